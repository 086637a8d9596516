"""The GPU's kernels in the variants for BitNet's 2B model, with the types of their arguments."""

from importlib.util import find_spec

SKINNY = ((1, 2560, 8, 2), (2, 2560, 2, 7), (2, 6912, 8, 2))  # for the 2B model's matrices, on 132 processors
NORMED = (
    ("row", 2560, 8, 2, "row"),
    ("row", 2560, 8, 2, "sum"),
    ("row", 2560, 2, 4, "relu2"),
    ("row", 6912, 8, 2, "sum"),  # the 2B model's matrices, on 132 processors
    ("row", 8640, 8, 2, "sum"),  # the widest of the 3B model's
    ("sum", 2560, 2, 4, "silu"),
    ("row", 2560, 2, 4, "relu2", 2),
    ("sum", 2560, 2, 4, "silu", 2),
)


ROWS = (("row", 2560, 1024), ("sum", 2560, 256), ("relu2", 6912, 512), ("silu", 2560, 256), ("silu", 9216, 512))


def kernels() -> dict[str, tuple]:
    """The kernels by name, each with the types of its arguments, and the threads of a block if these limit its registers."""
    from numba.cuda import types as t

    from bitnet_np.gpu.backend import GROUPS, TILES
    from bitnet_np.kernels.cuda import attention, attention_split, floats, norms, rows, ternary, ternary_groups
    from bitnet_np.kernels.cuda.attention_shape import shape_for

    f, i, f1, f2, f3, f4 = t.float32, t.int64, t.float32[::1], t.float32[:, ::1], t.float32[:, :, ::1], t.float32[:, :, :, ::1]
    ids, words, signed = t.int64[::1], t.uint32[::1], t.int32[::1]
    matrices = (t.UniTuple(words, 3), t.UniTuple(i, 3), t.UniTuple(i, 3), t.UniTuple(f, 3), words, f1)
    by_tokens = (*matrices, i, i, f1)
    rotation, halves = (f2, f2, i, i, i), t.int16[::1]
    masked = (f1, i, i, i)

    def attended(cached: t.Array = f1) -> tuple:
        return (f3, *rotation, cached, cached, ids, ids, i, i, f, f)

    def split(cached: t.Array) -> tuple:
        return (f3, *rotation, f3, *attended(cached), i, f1, f3, f3, signed, f3)

    def shapes(queries: int) -> list:  # the widest heads of each layout; cuda_checks runs narrower ones
        return [shape_for(width, queries) for width in (128, 256)]

    listed = [
        (rows.quantize, (f2, i, words, f1)),
        *((rows.rms_norm(source), (f2, f2, f2, f1, f, f2)) for source in ("sum", "silu")),
        *((norms.rms_norm(*how), (f1, f1, f1, f1, f, f1)) for how in ROWS[:2]),
        *((norms.normed_codes(*how), (f1, f1, f1, f1, f, words, f1)) for how in ROWS),
        (rows.layer_norm, (f2, f1, f1, f, f2)),
        (rows.add, (f1, f1, f1)),
        (rows.add_bias, (f1, f1, f1)),
        (rows.scaled, (f1, f, f1)),
        (rows.relu2_gate, (f1, f1, f1)),
        (rows.silu_gate, (f1, f1, f1)),
        (rows.gelu, (f1, f1)),
        (rows.gelu_tanh, (f1, f1)),
        (rows.gelu_gate, (f1, f1, f1)),
        (rows.soft_cap, (f1, f, f1)),
        (rows.largest, (f2, ids)),
        (rows.take, (f2, ids, f2)),
        (rows.fill, (f1, f)),
        (rows.spread, (f2, ids, ids, f3)),
        *(
            (rows.keep(bits), (f3, f3, *rotation, ids, ids, cached, cached))
            for bits, cached in ((False, f4), (True, t.int16[:, :, :, ::1]))
        ),
        (rows.erase, (f4, i, i, i)),
        (rows.carry, (f4, i, f4, i, i, i)),
        (rows.rope, (f3, *rotation, f3)),
        (rows.take_rotations, (f2, f2, ids, f2, f2)),
        (rows.advance, (ids, i, ids, ids)),
        (rows.fill_mask, (i, ids, ids, ids, i, i, i, i, f, f, f3)),
        (floats.embed("float16"), (t.uint32[:, ::1], ids, f2)),
        (floats.matmul("float16", 1), (words, f1, i, i, i, i, f1)),
        (floats.matmul("bfloat16", 4), (words, f1, i, i, i, i, f1)),
        (floats.matmul("bfloat16", 16), (words, f1, i, i, i, i, f1)),
        (floats.matmul("float32", 8), (words, f1, i, i, i, i, f1)),
        *((norms.normed_product(*how), (f1, f1, f1, f1, f, *matrices[:4], f1, f1)) for how in NORMED),
        *((ternary.gemv(warps, depth), (*matrices, i, f1)) for warps, depth in ((8, 3), (16, 4))),
        *((ternary.skinny(*how), (*matrices, i, f1)) for how in SKINNY),
        *((ternary.gemm(*tile), by_tokens) for tile in TILES),
        *((ternary_groups.gemm(*shape), by_tokens) for shape in GROUPS),
        *((attention.attend(shape), (*attended(), i, f3)) for shape in shapes(16)),
        (attention.attend(shape_for(128, 32, many=True)), (*attended(), i, f3)),
        *((attention_split.attend_chunk(shape, True), split(f1)) for shape in shapes(4)),
        (attention_split.attend_chunk(shape_for(128, 8), True), split(f1)),
        (attention_split.attend_chunk(shape_for(128, 4), False), split(f1)),
        (attention.attend(shape_for(128, 16, True)), (*attended(halves), i, f3)),
        (attention_split.attend_chunk(shape_for(128, 4, True), True), split(halves)),
        (attention.attend(shape_for(128, 16, capped=True)), (*attended(), i, f3)),
        (attention_split.attend_chunk(shape_for(128, 4, capped=True), True), split(f1)),
        (attention.attend_masked(shape_for(128, 16)), (*attended(), *masked, f3)),
    ]
    named = {f"{kernel.py_func.__name__} {number}": (kernel, types) for number, (kernel, types) in enumerate(listed)}
    return {name: (kernel.py_func, types, kernel.targetoptions.get("launch_bounds")) for name, (kernel, types) in named.items()}


KERNELS = kernels() if find_spec("numba_cuda") else {}
