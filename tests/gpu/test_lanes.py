"""How the lanes of a warp fold what they share: the order of the sums, by the code of ptx.py with NumPy for LLVM."""

from types import SimpleNamespace

import numpy as np
import pytest
from gpu_marks import needs_package


def on_lanes(monkeypatch, instruction, numbers: np.ndarray) -> list[np.ndarray]:
    """The results of an instruction of ptx.py for 32 lanes with a local array each, [n, 32]: its own code, with NumPy in place of LLVM."""
    from numba.cuda import types

    from bitnet_np.kernels.cuda import ptx

    builder = SimpleNamespace(load=lambda address, typ: address, fadd=np.add)
    context = SimpleNamespace(make_tuple=lambda builder, kind, values: values)
    monkeypatch.setattr(ptx, "_address", lambda context, builder, kind, array, offset: array[offset.constant])
    monkeypatch.setattr(ptx, "_butterfly", lambda builder, x, distance: x[np.arange(32) ^ distance])
    monkeypatch.setattr(ptx, "_rounded", lambda builder, operation, a, b: np.float32(getattr(a, "constant", a)) + b)
    signature, codegen = instruction._defn(None, types.float32[::1])
    return codegen(context, builder, signature, [numbers])


@needs_package
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_four_lanes_fold_the_dot_products_that_they_share(monkeypatch, columns):
    from bitnet_np.kernels.cuda import ptx

    lanes = np.random.default_rng(1).standard_normal((8, 4, columns, 16)).astype(np.float32)  # of tiles, rows, columns
    numbers = np.empty((16 * columns, 32), np.float32)
    for lane in range(32):
        tile, quarter = lane % 8, lane // 8
        numbers[:, lane] = lanes[tile][np.arange(4) ^ quarter, :, 4 * quarter : 4 * quarter + 4].reshape(-1)
    folded = on_lanes(monkeypatch, ptx.fold_quarters(columns), numbers)
    for lane in range(32):
        np.testing.assert_array_equal([column[lane] for column in folded], by_halving(lanes[lane % 8, lane // 8]))


@needs_package
def test_a_quad_folds_a_chunk_of_weights(monkeypatch):
    from bitnet_np.kernels.cuda import ptx

    weights = np.random.default_rng(1).standard_normal((8, 4, 16)).astype(np.float32)  # of quads, parts
    numbers = np.empty((16, 32), np.float32)
    for lane in range(32):
        numbers[:, lane] = weights[lane // 4][:, 4 * (lane % 4) : 4 * (lane % 4) + 4].reshape(-1)
    in_order = ((weights[:, 0] + weights[:, 1]) + weights[:, 2]) + weights[:, 3]
    np.testing.assert_array_equal(on_lanes(monkeypatch, ptx.fold_quad, numbers), np.repeat(by_halving(in_order), 4))


def by_halving(lanes: np.ndarray) -> np.ndarray:
    """[..., 16] -> [...]"""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]
