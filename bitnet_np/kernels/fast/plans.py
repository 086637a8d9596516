"""How matrices in ggml's block types are multiplied by bytes: the order of a type's codes, their range, and where floats begin.

A product takes a matrix in chunks of at least 64 weights of a row: one block, or two of the types with 32 weights to a block. Integers are
exact, so codes may come in whichever order is unpacked fastest; activations are put into the same order once for each call.
"""

from ...base.block_formats import FORMATS, RUN, Bits, Digit, Flags, Format, Integers
from .byte_dots import PATHS

REGISTER = 64  # codes in a logical register of bytes
BLOCK_OF_K = 256  # weights of a block whose activations llama.cpp rounds to Q8_K; those of smaller blocks it rounds to Q8_0
SMALL_BLOCK = 32  # numbers to a scale in Q8_0


class Plan:
    """One type's product."""

    def __init__(self, block_format: Format) -> None:
        scale, minimum = block_format.scale, block_format.minimum
        self.block_format = block_format
        # the runs of 16 weights of a block in the order of the row: a record of integers, and the number of the run in it
        self.runs = [(codes, run) for codes in block_format.codes for run in range(codes.runs)]
        self.blocks = max(1, REGISTER // block_format.weights)  # of a chunk
        self.weights = self.blocks * block_format.weights  # of a chunk
        self.is_k = block_format.weights == BLOCK_OF_K  # a block is one unit: a sum of integers that becomes a float
        self.activations = BLOCK_OF_K if self.is_k else SMALL_BLOCK  # that have a common scale
        # weights of a unit: those that share both scales, of the weights and of the activations, but for small integer factors
        self.unit = BLOCK_OF_K if self.is_k else SMALL_BLOCK if len(set(scale.lanes[:2])) == 1 or not scale.table else RUN
        self.units = self.weights // self.unit  # of a chunk
        self.width = min(self.unit, REGISTER)  # weights of a unit in a register
        # the runs of a chunk as they are multiplied: those of a large block by the place of their bits, so that four runs are unpacked at
        # once from neighbouring bytes; units of small blocks stay in order
        self.order = list(range(self.blocks * len(self.runs)))
        if self.is_k:
            self.order.sort(key=lambda run: _place(*self.runs[run]))
        self.code_range = _range(block_format.codes[0])  # the least code, and a bound of the greatest
        self.is_wide = self.code_range[1] - self.code_range[0] > 127  # most instructions then multiply codes with their sign, some + 128
        self.is_scaled = scale.integers is not None  # runs have small integer scales
        self.has_integer_minimum = bool(minimum and minimum.integers)  # runs have small integers that count how often it is subtracted
        self.has_float_minimum = bool(minimum and not minimum.integers)  # a block has one that multiplies rounded sums of activations
        self.registers = 1 + self.has_integer_minimum if self.is_k else self.weights // REGISTER  # of sums that one row's chunk makes

    def offset(self, path: str) -> int:
        """What makes unsigned bytes of codes when it is added, on an instruction path; sums of activations subtract it again."""
        if self.is_wide:
            return 128 if PATHS[path].dot and not PATHS[path].signed else 0
        return -self.code_range[0]

    def fits_words(self, codes: int, offset: int = 0) -> bool:
        """Whether a sum of this many codes plus the offset times activations has 16 bits."""
        return codes * 127 * max(abs(code + offset) for code in self.code_range) <= 32767

    def word_registers(self, path: str) -> int:
        """Registers of a run's codes whose products with activations are added up in words, two products to a word: 4 or 2 where words
        gain anything, else 0."""
        if not PATHS[path].pairs or self.is_wide:
            return 0
        return min(4, 32767 // (2 * 127 * (self.code_range[1] + self.offset(path))))


def _range(integers: Integers) -> tuple[int, int]:
    if integers.table:
        return min(integers.table), max(integers.table)
    if integers.signed:
        return -128, 127
    return -integers.bias, sum(_greatest(part) for part in integers.parts) - integers.bias


def _greatest(part: Bits | Flags | Digit) -> int:
    if isinstance(part, Digit):
        return 2
    return (max(part.mask) if isinstance(part, Bits) else 1) << part.place


def _place(codes: Integers, run: int) -> tuple[int, int]:
    """The shift of a run's codes and their first byte."""
    part = codes.parts[0]
    if isinstance(part, Bits):
        return part.shift[RUN * run], part.at[RUN * run]
    return 0, 0  # digits: as they come


PLANS = {name: Plan(block_format) for name, block_format in FORMATS.items()}
