"""Changes to Hugging Face folders that know their files: values of config.json, entries and bytes of tensors, sizes that agree."""

import json
import random
from functools import partial
from typing import Any

from bitnet_np.base.errors import Error
from bitnet_np.files.safetensors_file import DTYPES, header
from bitnet_np.testing.hf_files import FLOATS, folder_files, folder_model, folder_tensors
from fuzzing.gguf_bytes import Entry

from .edits import FLOAT_VALUES, NUMBERS, SHAPES, edit_file, edit_tensors
from .seeds import CONFIGS

Files = dict[str, bytes]

_SIZE_KEYS: tuple[str, ...] = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SIZE_KEYS += ("max_position_embeddings", "n_embd", "n_head", "n_inner", "n_positions")
_SIZE_KEYS += ("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_KNOWN: dict[str, Any] = {key: value for config in CONFIGS.values() for key, value in config.items()} | {
    "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
    "quantization": {"group_size": 32, "bits": 4, "model.layers.0.mlp.gate": {"group_size": 32, "bits": 8}, "lm_head": False},
    "group_size": 64,
    "bits": 3,
    "linear_class": "bitlinear",
    "quantization_mode": "offline",
    "modules_to_not_convert": ["lm_head", "model.layers.0"],
    "use_rms_norm": True,
    "text_config": {"model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    "use_parallel_residual": False,
    "is_bitnet_config": True,
    "rope_interleaved": False,
    "activation": "swiglu",
    "parallel_attn": False,
    "weight_bits": 1,
    "architectures": ["BitnetForCausalLM"],
    "mlp_only_layers": [0],
}
"""Keys that mean something in some folder, and a value of each."""

_NEEDED = ("config.json", "model.safetensors", "model.safetensors.index.json")  # a folder without these holds no model
_VALUES: list[Any] = [None, True, False, "", "bitnet", "llama", "silu", "relu2", "gelu", "x" * 300, [], [[]], {}, {"a": 1}, 1.5, 10**400]


def changed_folder(files: Files, draw: random.Random) -> Files:
    """The files of a folder with one to three changes; in one of four cases the sizes change, in agreement with each other."""
    files = dict(files)
    resized = draw.random() < 0.25 and _resize(files, draw)
    for _ in range(draw.randint(0, 2) if resized else draw.randint(1, 3)):
        draw.choice((_edit_config, _edit_config, _edit_tensors, _edit_tensors, partial(edit_file, kept=_NEEDED)))(files, draw)
    return files


def _resize(files: Files, draw: random.Random) -> bool:
    """Give the model other sizes and other random weights. Returns whether it could."""
    config = json.loads(files["config.json"])
    sizes = config.get("text_config", config)
    for key in draw.sample([key for key in _SIZE_KEYS if key in sizes], 2):
        sizes[key] = draw.choice(SHAPES)
    try:
        tensors = folder_tensors(config, folder_model(config, draw.randrange(9)), draw.choice(FLOATS))
        drawn = folder_files(config, tensors, draw.choice([1, 1, 2]))
    except Error:
        return False
    for name in [name for name in files if name.startswith("model")]:
        del files[name]
    files |= drawn
    return True


# --- config.json ----------------------------------------------------------------------------------------------------------------------


def _edit_config(files: Files, draw: random.Random) -> None:
    """Change a value, or delete or add a key, at the top or in an object."""
    try:
        config = json.loads(files["config.json"])
    except Exception:  # an earlier change damaged it
        return
    objects = [config, *(value for value in config.values() if isinstance(value, dict))] if isinstance(config, dict) else []
    where = draw.choice(objects) if objects else {}
    change = draw.random()
    if where and change < 0.6:
        key = draw.choice(sorted(where))
        same = type(where[key]) in (int, float) and draw.random() < 0.7
        where[key] = draw.choice([*NUMBERS, *FLOAT_VALUES] if same else [*_VALUES, *NUMBERS])
    elif where and change < 0.75:
        del where[draw.choice(sorted(where))]
    else:
        key = draw.choice(sorted(_KNOWN))
        where[key] = _KNOWN[key]
    files["config.json"] = json.dumps(config).encode()


# --- tensors --------------------------------------------------------------------------------------------------------------------------


_TYPES = {name: lambda count, size=dtype.itemsize: count * size for name, dtype in DTYPES.items()}


def _edit_tensors(files: Files, draw: random.Random) -> None:
    """Change the tensors of a file, whose sizes in the header are those of their shapes even where their bytes are not."""
    names = sorted(name for name in files if name.endswith(".safetensors"))
    name = draw.choice(names or sorted(files))
    try:
        raw = files[name]
        start = 8 + int.from_bytes(raw[:8], "little")
        table = {key: entry for key, entry in json.loads(raw[8:start]).items() if key != "__metadata__"}
        places = {key: [start + at for at in entry["data_offsets"]] for key, entry in table.items()}
        tensors = [Entry(key, entry["shape"], entry["dtype"], data=raw[slice(*places[key])]) for key, entry in table.items()]
        edit_tensors(tensors, draw, _TYPES)
        shapes = [(str(tensor.name), tensor.type, tuple(tensor.dims)) for tensor in tensors]
        files[name] = header(shapes) + b"".join(tensor.content() for tensor in tensors)
    except Exception:  # an earlier change damaged it
        return
