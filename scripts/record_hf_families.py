"""Record the logits of Hugging Face transformers for small random models of families other than BitNet: `record_hf_families.py FOLDER`.

It needs torch and transformers. bitnet_np.testing draws each model, which is written as <name>.gguf. transformers gets the weights in its
own layout. <name>.npz gets `tokens` [B, T], `logits_f32`, which transformers computes in float32, and `logits_f64`, with float64 for every
float32 in its source (it computes in float32 in places, whatever the model's dtype).
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from crossval_hf import Float64
from numpy.typing import NDArray

from bitnet_np import Model
from bitnet_np.errors import UnsupportedError
from bitnet_np.files.gguf_writer import present
from bitnet_np.files.hf_model_types import MODEL_TYPES, ModelType
from bitnet_np.model import Layer, Linear, LongRope, Yarn
from bitnet_np.rope import llama3_factors, rope_frequencies, scaling_factors
from bitnet_np.testing import random_model, write_gguf

SHAPE: dict[str, Any] = {"width": 48, "ffn": 40, "heads": 4, "kv_heads": 2, "head_dim": 12, "vocab": 61, "context": 64, "n_layers": 2}
SHAPE |= {"eps": float(np.float32(1e-5))}
LLAMA3: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "attention_factor": 1.25}
SHORT, LONG = (1.0, 1.25, 1.5, 2.0), (1.0, 2.0, 4.0, 8.0)
LONGROPE: dict[str, Any] = {"short_factor": list(SHORT), "long_factor": list(LONG)}
LONGROPE |= {"original_max_position_embeddings": 16, "attention_factor": 1.25}
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """One model: its family, its settings, and transformers' classes and options for the same."""

    name: str
    family: str
    shape: dict[str, Any]
    module: str
    classes: str  # <classes>Config and <classes>ForCausalLM or LMHeadModel
    options: dict[str, Any]
    weights: Callable[[Model], dict[str, Array]]


def cases() -> list[Case]:
    rope = {"rope_theta": 10000.0}
    llama3 = {"rope_parameters": {"rope_type": "llama3", **rope, **LLAMA3}}
    linear = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **rope}}
    yarn = {"rope_parameters": {"rope_type": "yarn", **rope, **YARN}}
    plain = {"rope_parameters": {"rope_type": "default", **rope}}
    mha = {"kv_heads": 4}
    square = {"width": 64}  # transformers keeps Gemma's factor, the root of the width, in float32
    granite = {"embedding_multiplier": 3.0, "residual_multiplier": 0.375, "logits_scaling": 2.5, "attention_multiplier": 0.125}
    gemma2 = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0, "query_pre_attn_scalar": 12, "sliding_window": 6}
    gemma3: dict[str, Any] = {"final_logit_softcapping": 20.0, "query_pre_attn_scalar": 12, "sliding_window": 6}
    gemma3 |= {"layer_types": ["sliding_attention", "full_attention"]}
    gemma3["rope_parameters"] = {
        "full_attention": linear["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    shared = {"shared_expert_intermediate_size": 24}
    neox = {"hidden_act": "gelu", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **rope}}
    phi3: dict[str, Any] = {
        "pad_token_id": 0,
        "sliding_window": 7,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.67, **rope},
    }
    return [
        Case("llama_llama3_biases", "llama", {}, "llama", "Llama", {"attention_bias": True, "mlp_bias": True} | llama3, _llama),
        Case("qwen2_linear", "qwen2", {"rope_scaling": 4.0}, "qwen2", "Qwen2", linear, _llama),
        Case("qwen3_wide_heads", "qwen3", {"head_dim": 16}, "qwen3", "Qwen3", plain, _llama),
        Case("qwen3_yarn", "qwen3", {"yarn": Yarn(4.0, 16, fast=4.0), "rope_magnitude": 1.25}, "qwen3", "Qwen3", yarn, _llama),
        Case("gptneox_parallel", "gptneox", {"rope_width": 6, "parallel_residual": True} | mha, "gpt_neox", "GPTNeoX", neox, _gptneox),
        Case(
            "gptneox_sequential",
            "gptneox",
            {"rope_width": 6, "parallel_residual": False} | mha,
            "gpt_neox",
            "GPTNeoX",
            neox | {"use_parallel_residual": False},
            _gptneox,
        ),
        Case("gpt2", "gpt2", mha, "gpt2", "GPT2", {"activation_function": "gelu_new"}, _gpt2),
        Case("mistral_window", "llama", {"window": 5}, "mistral", "Mistral", {"sliding_window": 5} | plain, _llama),
        Case(
            "qwen2_window",
            "qwen2",
            {"window": 6, "window_layers": (1,)},
            "qwen2",
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1} | plain,
            _llama,
        ),
        Case(
            "qwen3_window",
            "qwen3",
            {"window": 7, "window_layers": (0,)},
            "qwen3",
            "Qwen3",
            {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]} | plain,
            _llama,
        ),
        Case(
            "granite",
            "granite",
            {},
            "granite",
            "Granite",
            {"attention_bias": True, "mlp_bias": True} | granite | llama3,
            _layout("granite"),
        ),
        Case(
            "smollm3",
            "smollm3",
            {"n_layers": 5, "vocab": 31, "ffn": 24},
            "smollm3",
            "SmolLM3",
            {"pad_token_id": 0} | plain,
            _layout("smollm3"),
        ),
        Case("phi3", "phi3", {"rope_width": 8, "window": 7}, "phi3", "Phi3", phi3, _layout("phi3")),
        Case(
            "phi3_longrope",
            "phi3",
            {"rope_width": 8, "longrope": LongRope(16, SHORT, LONG), "rope_magnitude": 1.25, "vocab": 31, "ffn": 24},
            "phi3",
            "Phi3",
            phi3
            | {"sliding_window": None, "original_max_position_embeddings": 16}
            | {"rope_parameters": phi3["rope_parameters"] | {"rope_type": "longrope", **LONGROPE}},
            _layout("phi3"),
        ),
        Case("olmo2", "olmo2", {}, "olmo2", "Olmo2", plain, _layout("olmo2")),
        Case("gemma", "gemma", square, "gemma", "Gemma", {"hidden_act": "gelu_pytorch_tanh"} | plain, _layout("gemma")),
        Case(
            "gemma2",
            "gemma2",
            square | {"window": 6, "n_layers": 3, "logit_cap": 20.0},
            "gemma2",
            "Gemma2",
            gemma2 | plain,
            _layout("gemma2"),
        ),
        Case(
            "gemma3",
            "gemma3",
            square | {"window": 6, "heads": 2, "kv_heads": 1, "vocab": 31, "ffn": 24, "logit_cap": 20.0, "rope_scaling": 4.0},
            "gemma3",
            "Gemma3",
            gemma3,
            _layout("gemma3_text"),
        ),
        Case(
            "mixtral",
            "llama",
            {"experts": 4, "experts_used": 2},
            "mixtral",
            "Mixtral",
            {"num_local_experts": 4, "num_experts_per_tok": 2} | plain,
            _layout("mixtral"),
        ),
        Case("qwen2_moe", "qwen2moe", {"shared_ffn": 24}, "qwen2_moe", "Qwen2Moe", experts | shared | plain, _layout("qwen2_moe")),
        Case("qwen3_moe", "qwen3moe", {}, "qwen3_moe", "Qwen3Moe", experts | {"norm_topk_prob": True} | plain, _layout("qwen3_moe")),
    ]


def draw(case: Case, seed: int) -> Model:
    """A model that a GGUF file can hold. GGUF has no setting for transformers' exact GELU of gptneox: set it after loading."""
    model = random_model(
        seed, family=case.family, tied=case.family in ("qwen2", "gpt2", "gemma", "gemma2", "gemma3"), **{**SHAPE, **case.shape}
    )
    if case.classes.startswith("Gemma"):
        return _of_float32_differences(model)
    if case.classes in ("Mistral", "SmolLM3", "Mixtral"):
        return _bare(model)
    if model.rope_factors is None or scaling_factors(model.config) is not None:
        return replace(model, output_bias=None)
    frequencies = rope_frequencies(model.config.rope_base, 2 * model.config.rope_pairs)
    return replace(model, output_bias=None, rope_factors=llama3_factors(frequencies, *LLAMA3.values()).astype(np.float32))


def _of_float32_differences(model: Model) -> Model:
    """The model with gains that are 1 more than a float32."""

    def rounded(gain: NDArray) -> NDArray:
        return (gain - np.float32(1)) + np.float32(1)

    layers: list[dict[str, Any]] = [
        {name: rounded(x) if isinstance(x, np.ndarray) else x for name, x in vars(layer).items()} for layer in model.layers
    ]
    return replace(model, layers=tuple(Layer(**layer) for layer in layers), output_norm=rounded(model.output_norm))


def _bare(model: Model) -> Model:
    """The model without biases and RoPE factors, which a file of architecture llama may have and Mistral has not."""
    fields: list[dict[str, Any]] = [
        {name: replace(x, bias=None) if isinstance(x, Linear) else x for name, x in vars(layer).items()} for layer in model.layers
    ]
    layers = tuple(Layer(**field) for field in fields)
    c = model.config
    return replace(model, layers=layers, rope_frequency=rope_frequencies(c.rope_base, 2 * c.rope_pairs), rope_factors=None)


# --- the same weights in transformers' layouts ----------------------------------------------------------------------------------------


def _pair(name: str, linear: Linear, turn: Callable[[NDArray], NDArray] = lambda x: x) -> dict[str, Array]:
    assert isinstance(linear.weights, np.ndarray)
    bias = {} if linear.bias is None else {name + ".bias": turn(linear.bias)}
    return {name + ".weight": turn(linear.weights)} | bias


def _ends(model: Model, embedding: str, norm: str, head: str) -> dict[str, Array]:
    weights: dict[str, Any] = {embedding + ".weight": model.token_embd, norm + ".weight": model.output_norm, head + ".weight": model.head}
    if model.output_norm_bias is not None:
        weights[norm + ".bias"] = model.output_norm_bias
    return weights


def _layout(model_type: str) -> Callable[[Model], dict[str, Array]]:
    """The function that gives the weights by transformers' names for a type that descends from Llama."""
    return partial(_modules, MODEL_TYPES[model_type])


def _modules(kind: ModelType, model: Model) -> dict[str, Array]:
    """The weights by the names of a type, with RoPE pairs in halves: in Llama's GGUF files the rows are permuted, pairs adjacent."""
    c, one = model.config, np.float32(kind.less_one)

    def halved(x: NDArray) -> NDArray:
        return x.reshape(-1, c.head_dim // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    weights = _ends(model, kind.embedding, kind.norm, "lm_head")
    weights[kind.norm + ".weight"] = weights[kind.norm + ".weight"] - one
    for n, layer in enumerate(model.layers):
        named = present(layer)
        for field, module in kind.modules.items():
            path, value = kind.layer.format(n) + module, named.get(field)
            if isinstance(value, Linear):
                turned = c.rope == "adjacent" and field in ("attn_q", "attn_k")
                for name, rows in (_pair(path, value, halved) if turned else _pair(path, value)).items():
                    weights[name] = np.concatenate([weights[name], rows]) if name in weights else rows
            elif field == "ffn_gate_inp_shexp" and value is not None:
                weights[path + ".weight"] = value[None]
            elif value is not None:
                weights[path + ".weight"] = value - one
        for i, expert in enumerate(layer.experts):
            for field, module in kind.experts.items():
                weights |= _pair(kind.layer.format(n) + module.format(i), getattr(expert, field))
    return weights


def _in_memory(weights: dict[str, Array], n_layers: int) -> dict[str, Array]:
    """Weights of files as transformers 5 has them in memory: all experts of a layer in two tensors."""
    weights = {name.replace("block_sparse_moe", "mlp"): value for name, value in weights.items()}
    fused: dict[str, Array] = {}
    for n in range(n_layers):
        path = f"model.layers.{n}.mlp.experts."
        own = {name.removeprefix(path): weights.pop(name) for name in list(weights) if name.startswith(path)}
        count = len(own) // 3

        def stacked(*names: str, own: dict[str, Array] = own, count: int = count) -> Array:
            return np.stack([own[f"{i}.{name}.weight"] for i in range(count) for name in names if f"{i}.{name}.weight" in own])

        if own:
            pairs = stacked("gate_proj", "w1", "up_proj", "w3")
            fused[path + "gate_up_proj"] = pairs.reshape(count, -1, pairs.shape[2])
            fused[path + "down_proj"] = stacked("down_proj", "w2")
    return weights | fused


_llama = _layout("qwen3")  # the modules of all that descend from Llama without others


def _norms(path: str, layer: Layer, first: str, second: str) -> dict[str, Array]:
    assert layer.attn_norm is not None
    assert layer.ffn_norm is not None
    assert layer.attn_norm_bias is not None
    assert layer.ffn_norm_bias is not None
    return {
        f"{path}{first}.weight": layer.attn_norm,
        f"{path}{first}.bias": layer.attn_norm_bias,
        f"{path}{second}.weight": layer.ffn_norm,
        f"{path}{second}.bias": layer.ffn_norm_bias,
    }


def _qkv(layer: Layer) -> list[tuple[NDArray, NDArray]]:
    parts = []
    for linear in (layer.attn_q, layer.attn_k, layer.attn_v):
        assert isinstance(linear.weights, np.ndarray)
        assert linear.bias is not None
        parts.append((linear.weights, linear.bias))
    return parts


def _gptneox(model: Model) -> dict[str, Array]:
    """The weights by transformers' names: query, key and value of a head follow each other, head by head."""
    c = model.config
    weights = _ends(model, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "lm_head")
    for n, layer in enumerate(model.layers):
        path = f"gpt_neox.layers.{n}."
        for i, name in enumerate(("weight", "bias")):
            parts = [part[i].reshape(c.heads, 1, c.head_dim, -1) for part in _qkv(layer)]
            fused = np.concatenate(parts, axis=1)
            weights[f"{path}attention.query_key_value.{name}"] = fused.reshape(-1, c.width) if name == "weight" else fused.reshape(-1)
        weights |= _pair(path + "attention.dense", layer.attn_output)
        assert layer.ffn_up is not None
        assert layer.ffn_down is not None
        weights |= _pair(path + "mlp.dense_h_to_4h", layer.ffn_up) | _pair(path + "mlp.dense_4h_to_h", layer.ffn_down)
        weights |= _norms(path, layer, "input_layernorm", "post_attention_layernorm")
    return weights


def _gpt2(model: Model) -> dict[str, Array]:
    """The weights by transformers' names: matrices are [M, N]."""
    state = _ends(model, "transformer.wte", "transformer.ln_f", "lm_head")
    assert isinstance(model.position_embd, np.ndarray)
    state["transformer.wpe.weight"] = model.position_embd
    for n, layer in enumerate(model.layers):
        path = f"transformer.h.{n}."
        weights, biases = zip(*_qkv(layer), strict=True)
        state |= {path + "attn.c_attn.weight": np.concatenate(weights).T, path + "attn.c_attn.bias": np.concatenate(biases)}
        state |= _pair(path + "attn.c_proj", layer.attn_output, lambda x: x.T)
        assert layer.ffn_up is not None
        assert layer.ffn_down is not None
        state |= _pair(path + "mlp.c_fc", layer.ffn_up, lambda x: x.T) | _pair(path + "mlp.c_proj", layer.ffn_down, lambda x: x.T)
        state |= _norms(path, layer, "ln_1", "ln_2")
    return state


# --- theirs ---------------------------------------------------------------------------------------------------------------------------


def run(case: Case, model: Model, tokens: NDArray[np.int64], folder: Path | None = None) -> tuple[NDArray, NDArray]:
    """transformers' logits [B, T, V] in float32, and in float64 throughout. folder: where it saves the model."""
    try:
        torch: Any = importlib.import_module("torch")
        library: Any = importlib.import_module("transformers")
        modeling: Any = importlib.import_module(f"transformers.models.{case.module}.modeling_{case.module}")
        rotations: Any = importlib.import_module("transformers.modeling_rope_utils")
    except ImportError as error:
        raise UnsupportedError(f"recording needs torch and transformers: pip install torch transformers ({error})") from None
    c = model.config
    common = {"vocab_size": c.vocab, "tie_word_embeddings": model.output is None, "attn_implementation": "eager", "use_cache": False}
    common |= {"bos_token_id": 1, "eos_token_id": 2}
    if case.classes == "GPT2":
        sizes: dict[str, Any] = {"n_embd": c.width, "n_layer": c.n_layers, "n_head": c.heads, "n_inner": c.ffn, "n_positions": c.context}
        sizes |= {"layer_norm_epsilon": c.eps}
    else:
        sizes = {"hidden_size": c.width, "intermediate_size": c.ffn, "num_hidden_layers": c.n_layers, "num_attention_heads": c.heads}
        sizes |= {"max_position_embeddings": c.context, "layer_norm_eps" if c.norm == "layer" else "rms_norm_eps": c.eps}
        if c.norm == "rms":
            sizes |= {"num_key_value_heads": c.kv_heads, "head_dim": c.head_dim}
    config = getattr(library, case.classes + ("TextConfig" if case.classes == "Gemma3" else "Config"))(**common, **sizes, **case.options)
    config._experts_implementation = "eager"  # the others have no float64

    def build() -> Any:
        built = getattr(library, case.classes + ("LMHeadModel" if case.classes == "GPT2" else "ForCausalLM"))(config).eval()
        weights = _in_memory(case.weights(model), model.config.n_layers)
        state = {name: torch.from_numpy(np.array(value, np.float32)) for name, value in weights.items()}
        missing, unexpected = built.load_state_dict(state, strict=False)
        if unexpected or [name for name in missing if "rotary" not in name and not name.endswith(".attn.bias")]:
            raise UnsupportedError(f"{case.name}: transformers has other weights: {missing} are missing, {unexpected} have no place")
        return built

    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        built = build()
        if folder is not None:
            built.save_pretrained(folder)
        single = built(input_ids=ids).logits.numpy().copy()
        with ExitStack() as stack:
            for patched in (modeling, rotations):
                stack.enter_context(mock.patch.object(patched, "torch", Float64(torch)))
            stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
            strict = build().double()
            for module in strict.modules():
                types = getattr(module, "rope_type", {})
                for of_layers, kind in types.items() if isinstance(types, dict) else [(None, types)]:
                    init = module.compute_default_rope_parameters if kind == "default" else rotations.ROPE_INIT_FUNCTIONS[kind]
                    named = {} if of_layers is None else {"layer_type": of_layers}
                    frequency = init(config, *(() if kind == "default" else ("cpu",)), **named)[0]
                    setattr(module, "inv_freq" if of_layers is None else f"{of_layers}_inv_freq", frequency)
                    if frequency.dtype != torch.float64:
                        raise UnsupportedError("this transformers works out RoPE's frequencies in another way than with torch.float")
            exact = strict(input_ids=ids).logits
        if exact.dtype != torch.float64:
            raise UnsupportedError(f"{case.name}: transformers' logits are {exact.dtype}, expected float64")
        return single, exact.numpy().copy()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="some of the models")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    for case in [c for c in cases() if not options.only or c.name in options.only]:
        model = draw(case, options.seed)
        tokens = np.random.default_rng([options.seed, 1]).integers(0, model.config.vocab, (2, 24))
        try:
            single, exact = run(case, model, tokens)
        except UnsupportedError as error:
            print(f"record_hf_families.py: {error}", file=sys.stderr)
            return 2
        write_gguf(options.folder / f"{case.name}.gguf", model)
        np.savez_compressed(options.folder / f"{case.name}.npz", tokens=tokens, logits_f32=single, logits_f64=exact)
        print(
            f"{case.name}: float32 and float64 differ by {np.abs(single - exact).max():.2g}, logits are {np.abs(exact).max():.3g} at most"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
