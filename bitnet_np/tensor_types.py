"""The table of ggml's tensor types: how many bytes a tensor of each takes, and which of them this package can read.

Numbers and block sizes are those of ggml.h; I2_S (36) is a type of bitnet.cpp's fork of it, PQ2_0 (142) one of PrismML's. The table has
more types than can be read, so that a file with another one is refused by the name of the type and not by a wrong size.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorType:
    """One ggml type: `block` consecutive elements of a row are stored in `block_bytes` bytes.

    `trailer` bytes follow the last block of the tensor: I2_S keeps its one float32 scale and 28 bytes of padding there.
    `remark` is for the message that refuses a tensor of the type; it may be empty.
    """

    name: str
    number: int
    block: int
    block_bytes: int
    trailer: int = 0
    readable: bool = False
    remark: str = ""

    def nbytes(self, elements: int) -> int:
        """Bytes of a tensor of `elements` elements, which must be a multiple of `block`."""
        return elements // self.block * self.block_bytes + self.trailer


F32 = TensorType("F32", 0, 1, 4, readable=True)
F16 = TensorType("F16", 1, 1, 2, readable=True)
BF16 = TensorType("BF16", 30, 1, 2, readable=True)
F64 = TensorType("F64", 28, 1, 8, readable=True)
I2_S = TensorType("I2_S", 36, 128, 32, trailer=32, readable=True)
Q4_0 = TensorType("Q4_0", 2, 32, 18, readable=True)
Q4_1 = TensorType("Q4_1", 3, 32, 20, readable=True)
Q5_0 = TensorType("Q5_0", 6, 32, 22, readable=True)
Q5_1 = TensorType("Q5_1", 7, 32, 24, readable=True)
Q8_0 = TensorType("Q8_0", 8, 32, 34, readable=True)
Q2_K = TensorType("Q2_K", 10, 256, 84, readable=True)
Q3_K = TensorType("Q3_K", 11, 256, 110, readable=True)
Q4_K = TensorType("Q4_K", 12, 256, 144, readable=True)
Q5_K = TensorType("Q5_K", 13, 256, 176, readable=True)
Q6_K = TensorType("Q6_K", 14, 256, 210, readable=True)
TQ1_0 = TensorType("TQ1_0", 34, 256, 54, readable=True)
TQ2_0 = TensorType("TQ2_0", 35, 256, 66, readable=True)
Q1_0 = TensorType("Q1_0", 41, 128, 18, readable=True)
Q2_0 = TensorType("Q2_0", 42, 64, 18, readable=True)
PQ2_0 = TensorType("PQ2_0", 142, 128, 34, readable=True)

FEW_BITS = (Q1_0, Q2_0, PQ2_0)
"""The types of one float16 scale, and codes of one bit (-1, +1) or two (-1, 0, +1, +2), low ones first. Their activations are floats."""

BLOCK_TYPES = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, TQ1_0, TQ2_0, *FEW_BITS)
"""The types whose weights are small integers times the scales of a block (kernels/block_formats.py)."""

TERNARY_TYPES = (TQ1_0, TQ2_0)
"""The block types whose weights are -1, 0, +1 times the scale of a block."""

_TILED = (
    "its bytes depend on tile sizes that were chosen when the file was made and are not in it; make an I2_S file from the original model"
)

_KNOWN = (
    F32,
    F16,
    BF16,
    F64,
    I2_S,
    *BLOCK_TYPES,
    TensorType("Q8_1", 9, 32, 40),
    TensorType("Q8_K", 15, 256, 292),
    TensorType("IQ2_XXS", 16, 256, 66),
    TensorType("IQ2_XS", 17, 256, 74),
    TensorType("IQ3_XXS", 18, 256, 98),
    TensorType("IQ1_S", 19, 256, 50),
    TensorType("IQ4_NL", 20, 32, 18),
    TensorType("IQ3_S", 21, 256, 110),
    TensorType("IQ2_S", 22, 256, 82),
    TensorType("IQ4_XS", 23, 256, 136),
    TensorType("I8", 24, 1, 1),
    TensorType("I16", 25, 1, 2),
    TensorType("I32", 26, 1, 4),
    TensorType("I64", 27, 1, 8),
    TensorType("IQ1_M", 29, 256, 56),
    TensorType("MXFP4", 39, 32, 17, remark=f"or TL2, which has the same number in bitnet.cpp: {_TILED}"),
    TensorType("NVFP4", 40, 64, 36),
)

BY_NUMBER = {known.number: known for known in _KNOWN}

OF_NUMBER_42 = (Q2_0, PQ2_0)
"""The types that files have under the number 42: ggml's, and the one that PrismML's fork wrote under this number at first."""

NEITHER_OF_42 = f"the number is also that of TL2 in bitnet.cpp's later versions: {_TILED}"

REFUSED = {38: f"bitnet.cpp's TL1: {_TILED}"}
"""The types whose tensors have no size that could be known, by number, and why."""
