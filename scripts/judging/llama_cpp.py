"""llama.cpp in this process, with every tensor of its graph: llama-cpp-python, at least 0.3.36."""

import ctypes
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np import Config
from bitnet_np.base.errors import UnsupportedError
from bitnet_np.traces.points import LAYER_NAMES, POOLED, Key

Points = dict[Key, NDArray]

CACHES = {"float32": 0, "float16": 1, "q8_0": 8}
"""ggml's numbers of the types that a KV cache may have here."""


class _Tensor(ctypes.Structure):
    """ggml_tensor of ggml.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


F32, I32 = 0, 26  # of ggml.h


def _numbers(tensor: _Tensor) -> NDArray:
    shape, strides = list(tensor.ne)[::-1], list(tensor.nb)[::-1]
    size = 4 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    raw = np.frombuffer((ctypes.c_char * size).from_address(tensor.data or 0), np.uint8).copy()
    return np.lib.stride_tricks.as_strided(raw.view(np.int32 if tensor.type == I32 else np.float32), shape, strides).copy()


class LlamaCpp:
    """The part of llama.cpp that is used here. The constructor imports it."""

    def __init__(self) -> None:
        try:
            self.lib: Any = importlib.import_module("llama_cpp")
        except ImportError as error:
            raise UnsupportedError(f"cross-validation needs llama.cpp: pip install llama-cpp-python ({error})") from None
        self._log = self.lib.llama_log_callback(lambda level, text, data: None)
        self.lib.llama_log_set(self._log, ctypes.c_void_p(0))

    @property
    def version(self) -> str:
        return f"llama-cpp-python {self.lib.__version__}"

    def run(
        self, path: Path, tokens: NDArray[np.int64], cache: str = "float32", flash: bool = False, pooled: bool = False
    ) -> tuple[NDArray[np.float32], list[tuple[str, NDArray]]]:
        """Logits [T, V], and the names and values of the graph's tensors in the order of computation.

        cache: the type of the KV cache, one of CACHES. flash: whether attention is one operation of ggml. pooled: whether the graph ends in
        the pooled output that the file asks for, beside the logits.
        """
        lib, n = self.lib, len(tokens)
        options = lib.llama_model_default_params()
        options.n_gpu_layers, options.use_extra_bufts = 0, False
        model = lib.llama_model_load_from_file(str(path).encode(), options)
        if not model:
            raise UnsupportedError(f"{path}: llama.cpp does not load it")
        nodes: list[tuple[str, NDArray]] = []

        def seen(tensor: int, ask: bool, data: object) -> bool:
            node = ctypes.cast(tensor, ctypes.POINTER(_Tensor)).contents
            if not ask and node.type in (F32, I32) and node.data:
                nodes.append((node.name.decode(), _numbers(node)))
            return True

        settings = lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
        settings.n_threads = settings.n_threads_batch = 1
        settings.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.embeddings = pooled
        settings.type_k = settings.type_v = CACHES[cache]
        callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(seen)
        settings.cb_eval = ctypes.cast(callback, type(settings.cb_eval))
        context = lib.llama_init_from_model(model, settings)
        if not context:
            raise UnsupportedError(f"{path}: llama.cpp has no KV cache of {cache} for this model")
        batch = lib.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
                batch.seq_id[i][0] = 0
            if lib.llama_decode(context, batch):
                raise UnsupportedError(f"{path}: llama.cpp does not compute it")
            vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
            return np.ctypeslib.as_array(lib.llama_get_logits(context), (n, vocab)).copy(), nodes
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)
            lib.llama_model_free(model)


EXPERTS = tuple(name for name in LAYER_NAMES if name.startswith(("ffn_moe_", "ffn_shexp_")))


def _rename_phi3(by_name: dict[str, list[NDArray]], n: int) -> None:
    """Give the nodes of a layer of Phi-3 the meaning that they have elsewhere: its last Qcur is scaled, and its ffn_up is gate and up."""
    by_name[f"Qcur-{n}"].pop()
    (both,) = by_name.pop(f"ffn_up-{n}")
    by_name[f"ffn_gate-{n}"], by_name[f"ffn_up-{n}"] = ([half] for half in np.split(both, 2, axis=1))


def points(c: Config, nodes: Sequence[tuple[str, NDArray]], tokens: int) -> Points:
    """The nodes that are points of ours. Several nodes share a name: Qcur names those from the product to the rotation."""
    by_name: dict[str, list[NDArray]] = {}
    for name, array in nodes:
        by_name.setdefault(name, []).append(array.reshape(tokens if name != POOLED and array.size % tokens == 0 else 1, -1))
    points_by_key: Points = {}

    def take(name: str, layer: int | None, node: str, at: int = -1) -> None:
        label = node if layer is None else f"{node}-{layer}"
        if label in by_name:
            points_by_key[Key(name, layer)] = by_name[label][at]

    for name in ("inpL", "inp_scaled", "result_norm", POOLED, "result_output"):
        take(name, None, name)
    scaled_inside = c.embedding_scale != 1 and "inp_scaled" not in by_name
    take("inp_scaled" if scaled_inside else "inp_embd", None, "embd")
    for n in range(c.n_layers):
        if c.architecture == "phi3":
            _rename_phi3(by_name, n)
        rotated = c.rotates(n)
        for name in ("Qcur", "Kcur"):
            take(name, n, name, -2 if rotated else -1)
            take(name + "_normed", n, name + "_normed")
            if rotated:
                take(name + "_rope", n, name)
        for name in ("attn_norm", "Vcur", "kqv_out", "attn_sub_norm", "ffn_inp", "ffn_norm", "ffn_sub_norm", "l_out"):
            take(name, n, name)
        take("ffn_inp", n, "sa_out")
        take("attn_post_norm", n, "attn_post_norm")
        take("ffn_post_norm", n, "ffn_post_norm")
        for node in ("attn_o_out", "attn_out"):
            take("attn_o_out", n, node)
        for name in ("ffn_gate", "ffn_up"):
            for node in ("", "_s", "_b"):  # after the product, its scale, its bias
                take(name, n, name + node)
        for node in ("ffn_swiglu", "ffn_geglu", "ffn_gelu", "ffn_sub_out"):
            take("ffn_out", n, node)
        for name in EXPERTS if c.experts else ():
            take(name, n, name)
        take("ffn_moe_weights", n, "ffn_moe_weights_norm")
        if c.experts:
            take("ffn_down", n, "ffn_shexp")
            continue
        take("ffn_down", n, "ffn_down")
        take("ffn_down", n, "ffn_out", 0)  # with its bias; for a parallel residual, the node before anything is added
    return points_by_key
