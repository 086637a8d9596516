"""Measurements of a GPU: a random model made on the device, the device's peaks, and time by its clock."""

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from cuda.bindings import driver
from make_model import FOUR_CODES
from numba import cuda
from numpy.typing import NDArray

from bitnet_np.gpu import graph
from bitnet_np.gpu.arrays import DeviceTable, checked
from bitnet_np.gpu.backend import Cuda
from bitnet_np.kernels.cuda import layout
from bitnet_np.kernels.cuda.ptx import await_previous, for_each, load_fragments, multiply, zeros
from bitnet_np.kernels.cuda.target import kernel
from bitnet_np.model import Config, Layer, Linear, Model, Ternary

BITNET_2B = Config("bitnet-b1.58", 128256, 4096, 2560, 30, 6912, 20, 5, 128, 1e-5, 500000.0)
TINY = Config("bitnet-b1.58", 5, 64, 8, 1, 12, 2, 1, 4, 1e-5, 500000.0)


def seconds(on: Cuda, run: Callable[[], Any], calls: int, rounds: int = 5, as_graph: bool = True) -> float:
    """Seconds of one call by the device's clock: the median over rounds of `calls` calls each. A first call is not counted.

    The calls of a round are one captured graph: launched one by one from Python, small kernels would wait for the host.
    """
    run()

    def once() -> None:
        for _ in range(calls):
            run()

    launch = graph.captured(on.stream, once, overlap=False).launch if as_graph else once
    times = []
    for _ in range(rounds):
        start, end = cuda.event(), cuda.event()
        start.record(on.stream)
        launch()
        end.record(on.stream)
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return median(times)


# --- a model --------------------------------------------------------------------------------------------------------------------------


def ternary_words(n: int, m: int, rng: np.random.Generator) -> NDArray[np.uint32]:
    """The words of a random matrix [N, M] in the device's layout."""
    return FOUR_CODES[rng.integers(0, len(FOUR_CODES), 4 * layout.n_words((n, m)), np.uint8)].view(np.uint32)


def random_placed(config: Config, on: Cuda, seed: int = 0) -> Model:
    """A random model that is on the device only, with a float16 head. It serves to measure time, which does not depend on the weights."""
    rng = np.random.default_rng(seed)

    def linear(n: int, m: int) -> Linear:
        return Linear(Ternary(on.upload(ternary_words(n, m, rng)), np.float32(1 / np.sqrt(m)), (n, m)))

    def ones(n: int) -> Any:
        return on.upload(np.ones(n, np.float32))

    def layer() -> Layer:
        d, f, q, kv = config.width, config.ffn, config.q_width, config.kv_width
        matrices = {"attn_q": (q, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, q), "ffn_up": (f, d), "ffn_down": (d, f)}
        linears: Any = {name: linear(*shape) for name, shape in matrices.items()}
        return Layer(**linears, attn_norm=ones(d), ffn_norm=ones(d), ffn_gate=linear(f, d), attn_sub_norm=ones(q), ffn_sub_norm=ones(f))

    words = -(-config.width // 128) * 64
    some = rng.standard_normal(min(1 << 20, config.vocab * words * 2)).astype(np.float16).view(np.uint32)
    table: Any = DeviceTable(on.upload(np.resize(some, (config.vocab, words))), "float16", (config.vocab, config.width))
    frequency = config.rope_base ** (-np.arange(config.rope_pairs) / config.rope_pairs)
    return Model(config, table, tuple(layer() for _ in range(config.n_layers)), ones(config.width), frequency)


def bytes_per_token(config: Config) -> int:
    """Bytes of weights that a decoded token reads: two bits for each ternary weight, and the float16 head."""
    layer = config.width * (2 * config.q_width + 2 * config.kv_width + 3 * config.ffn)
    return config.n_layers * layer // 4 + 2 * config.vocab * config.width


def ternary_operations(config: Config) -> int:
    """Multiplications and additions of a token in the matrices of the layers."""
    return 2 * config.n_layers * config.width * (2 * config.q_width + 2 * config.kv_width + 3 * config.ffn)


# --- peaks ----------------------------------------------------------------------------------------------------------------------------


def copy_bandwidth(on: Cuda, size: int) -> float:
    """Bytes read and written per second by the driver's copy of `size` bytes."""
    source = on.upload(np.random.default_rng(0).integers(0, 256, size, np.uint8))  # zeros might be compressed on their way
    target = on.empty((size,), np.uint8)
    stream = int(on.stream.handle)
    return 2 * size / seconds(on, lambda: checked(driver.cuMemcpyDtoDAsync(target.address, source.address, size, stream)), 5)


_ROWS, _TOKENS, _WARPS = 4, 4, 4
_MMA_OPERATIONS = 2 * 16 * 8 * 32


def _tensor_loop() -> Any:
    count = 4 * _ROWS * _TOKENS
    none, step = zeros(count), multiply(_ROWS, _TOKENS, 0)
    load_weights, load_codes = load_fragments(_ROWS), load_fragments(_TOKENS)

    def add(i: int, sums: Any, total: Any) -> None:
        total[0] += sums[0]

    add_all = for_each(add, [[i] for i in range(count)])

    @kernel
    def tensor_loop(words: Any, turns: int, out: Any) -> None:
        await_previous()
        lane = cuda.threadIdx.x % 32
        weights, codes = load_weights(words, lane * 4, 128), load_codes(words, lane * 4, 128)
        sums = none()
        for _ in range(turns):
            sums = step(sums, weights, codes)
        total = cuda.local.array(1, np.int32)
        total[0] = 0
        add_all(sums, (total,))
        out[cuda.grid(1)] = total[0]

    return tensor_loop


def tensor_peak(on: Cuda, turns: int) -> float:
    """int8 operations per second of mma.sync in a loop that only unpacks weights beside it."""
    blocks = 2 * on.processors
    words = on.upload(np.random.default_rng(0).integers(0, 1 << 32, 128 * _ROWS, np.uint32))  # zeros would take less power
    out = on.empty((blocks * 32 * _WARPS,), np.int32)
    loop = _tensor_loop()
    time = seconds(on, lambda: on.run(loop, blocks, 32 * _WARPS, words, turns, out), 1)
    return blocks * _WARPS * turns * 2 * _ROWS * _TOKENS * _MMA_OPERATIONS / time
