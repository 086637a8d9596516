"""What the engines of this folder share: a model's numbers and matrices, how a prompt is cut into calls, and one run as a command."""

import sys

import gguf
import numpy as np


def opened(path, families):
    """The family of a GGUF file, a function of its keys, and all tensors in float32. Raises NotImplementedError for other families."""
    reader = gguf.GGUFReader(path)
    family = reader.fields["general.architecture"].contents()
    keys = {name.removeprefix(f"{family}."): field.contents() for name, field in reader.fields.items() if name.startswith(family)}
    keys.setdefault("attention.key_length", keys["embedding_length"] // keys["attention.head_count"])
    keys.setdefault("vocab_size", next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight"))
    extras = [t.name for t in reader.tensors if "rope_f" in t.name or (family == "llama" and t.name.endswith(".bias"))]
    if family not in families or extras or any(map(keys.get, ("attention.sliding_window", "expert_count", "rope.scaling.type"))):
        raise NotImplementedError(f"{family} with these settings is not supported here")
    return (
        family,
        keys.__getitem__,
        {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32, order="C") for t in reader.tensors},
    )


def calls(tokens, chunk, prefix):
    """The first position of each call and that behind it: of a reused prefix, then of chunks."""
    if isinstance(tokens, list):
        raise NotImplementedError("batches are not supported here")
    size = chunk or len(tokens)
    starts = [0, *range(prefix, len(tokens), size)] if prefix else [*range(0, len(tokens), size)]
    return list(zip(starts, [*starts[1:], len(tokens)], strict=True))


def main(engine):
    """One run: MODEL TOKENS OUT, and the numbers CHUNK and PREFIX (or what else the engine takes) behind them."""
    model, tokens, out, *numbers = sys.argv[1:]
    np.save(out, engine(model, np.load(tokens), *map(int, numbers)))
