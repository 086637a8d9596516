"""The table of ggml's tensor types: how many bytes a tensor of each takes, and which of them this package can read.

Numbers and block sizes come from ggml.h. I2_S (36) is a type of bitnet.cpp's fork of ggml, PQ2_0 (142) one of PrismML's. The table has
more types than can be read, so that a file with one of these is refused by the name of the type and not by a wrong size.
"""

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class TensorType:
    """One ggml type: `block` consecutive elements of a row are stored in `block_bytes` bytes.

    `trailer` bytes follow the last block of the tensor: I2_S keeps its one float32 scale and 28 bytes of padding there. A type is equal to
    itself alone: the kernels of a decoded token ask a thousand times which it is.
    """

    name: str
    number: int
    block: int
    block_bytes: int
    trailer: int = 0

    def nbytes(self, elements: int) -> int:
        """Bytes of a tensor of `elements` elements, which must be a multiple of `block`."""
        return elements // self.block * self.block_bytes + self.trailer


F32 = TensorType("F32", 0, 1, 4)
F16 = TensorType("F16", 1, 1, 2)
BF16 = TensorType("BF16", 30, 1, 2)
F64 = TensorType("F64", 28, 1, 8)
I2_S = TensorType("I2_S", 36, 128, 32, trailer=32)
Q4_0 = TensorType("Q4_0", 2, 32, 18)
Q4_1 = TensorType("Q4_1", 3, 32, 20)
Q5_0 = TensorType("Q5_0", 6, 32, 22)
Q5_1 = TensorType("Q5_1", 7, 32, 24)
Q8_0 = TensorType("Q8_0", 8, 32, 34)
Q2_K = TensorType("Q2_K", 10, 256, 84)
Q3_K = TensorType("Q3_K", 11, 256, 110)
Q4_K = TensorType("Q4_K", 12, 256, 144)
Q5_K = TensorType("Q5_K", 13, 256, 176)
Q6_K = TensorType("Q6_K", 14, 256, 210)
TQ1_0 = TensorType("TQ1_0", 34, 256, 54)
TQ2_0 = TensorType("TQ2_0", 35, 256, 66)
Q1_0 = TensorType("Q1_0", 41, 128, 18)
Q2_0 = TensorType("Q2_0", 42, 64, 18)
PQ2_0 = TensorType("PQ2_0", 142, 128, 34)
IQ4_NL = TensorType("IQ4_NL", 20, 32, 18)
IQ4_XS = TensorType("IQ4_XS", 23, 256, 136)
MXFP4 = TensorType("MXFP4", 39, 32, 17)
NVFP4 = TensorType("NVFP4", 40, 64, 36)
IQ2_XXS = TensorType("IQ2_XXS", 16, 256, 66)
IQ2_XS = TensorType("IQ2_XS", 17, 256, 74)
IQ2_S = TensorType("IQ2_S", 22, 256, 82)
IQ3_XXS = TensorType("IQ3_XXS", 18, 256, 98)
IQ3_S = TensorType("IQ3_S", 21, 256, 110)
IQ1_S = TensorType("IQ1_S", 19, 256, 50)
IQ1_M = TensorType("IQ1_M", 29, 256, 56)

FEW_BITS = (Q1_0, Q2_0, PQ2_0)
"""The types of one float16 scale, and codes of one bit (-1, +1) or two (-1, 0, +1, +2), low ones first. Their activations are floats."""

LOOKED_UP = (IQ4_NL, IQ4_XS, MXFP4, NVFP4)
"""The types whose codes of four bits stand for the integers of a table."""

BLOCK_TYPES = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, TQ1_0, TQ2_0, *FEW_BITS, *LOOKED_UP)
"""The types whose weights are small integers times the scales of a block (block_formats.py)."""

GRID_TYPES = (IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M)
"""The types whose codes stand for four or eight neighbouring weights at once: rows of a grid (kernels/ggml/grids.py)."""

ALL_BLOCK_TYPES = (*BLOCK_TYPES, *GRID_TYPES)
"""The types whose blocks a model keeps as they are in the file."""

TERNARY_TYPES = (TQ1_0, TQ2_0)
"""The block types whose weights are -1, 0, +1 times the scale of a block."""

_TILED = (
    "its bytes depend on tile sizes that were chosen when the file was made and are not in it; make an I2_S file from the original model"
)

_UNREADABLE = (("Q8_1", 9, 32, 40), ("Q8_K", 15, 256, 292), ("I8", 24, 1, 1), ("I16", 25, 1, 2), ("I32", 26, 1, 4), ("I64", 27, 1, 8))
READABLE = (F32, F16, BF16, F64, I2_S, *ALL_BLOCK_TYPES)
"""The types whose tensors this package reads."""
BY_NUMBER = {known.number: known for known in (*READABLE, *(TensorType(*numbers) for numbers in _UNREADABLE))}

OF_NUMBER_42 = (Q2_0, PQ2_0)
"""The types that files have under the number 42: ggml's, and the one that PrismML's fork wrote under this number at first."""

SHARED_NUMBERS = {39: (MXFP4,), 42: OF_NUMBER_42}
"""The numbers that bitnet.cpp gives to TL2, the latter in its later versions, and the types that else have them."""

OR_TL2 = f"the number is also that of TL2 in bitnet.cpp: {_TILED}"

REFUSED = {38: f"bitnet.cpp's TL1: {_TILED}"}
"""The types whose tensors have no size that could be known, by number, and why."""
