"""How matrices in ggml's block types are multiplied by bytes: the order of a type's codes, their range, and where floats begin.

A product takes a matrix in chunks of at least 64 weights of a row: one block, or two of the types with 32 weights to a block. Integers are
exact, so codes may come in the order in which they are unpacked fastest; activations are put into the same order once for each call.
"""

from dataclasses import dataclass
from functools import cached_property

from .block_formats import FORMATS, RUN, Bits, Digit, Flags, Format, Integers
from .fast.byte_dots import PATHS

REGISTER = 64  # codes in a logical register of bytes
BLOCK_OF_K = 256  # weights of a block whose activations llama.cpp rounds to Q8_K; those of smaller blocks it rounds to Q8_0
SMALL_BLOCK = 32  # numbers to a scale in Q8_0


@dataclass(frozen=True, eq=False)
class Plan:
    """One type's product."""

    block_format: Format

    @cached_property
    def runs(self) -> tuple[tuple[Integers, int], ...]:
        """The runs of 16 weights of a block in the order of the row: a record of integers, and the number of the run in it."""
        return tuple((codes, run) for codes in self.block_format.codes for run in range(codes.runs))

    @cached_property
    def blocks(self) -> int:
        """Blocks of a chunk."""
        return max(1, REGISTER // self.block_format.weights)

    @cached_property
    def weights(self) -> int:
        """Weights of a chunk."""
        return self.blocks * self.block_format.weights

    @property
    def is_k(self) -> bool:
        """Whether a block is one unit: a sum of integers that becomes a float."""
        return self.block_format.weights == BLOCK_OF_K

    @property
    def activations(self) -> int:
        """Activations that have a common scale."""
        return BLOCK_OF_K if self.is_k else SMALL_BLOCK

    @cached_property
    def unit(self) -> int:
        """Weights of a unit: those that share both scales, of the weights and of the activations, but for small integer factors."""
        if self.is_k:
            return BLOCK_OF_K
        return SMALL_BLOCK if len(set(self.block_format.scale.lanes[:2])) == 1 or not self.block_format.scale.table else RUN

    @property
    def units(self) -> int:
        """Units of a chunk."""
        return self.weights // self.unit

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The runs of a chunk in the order in which they are multiplied. Those of a large block go by the place of their bits, so that four
        runs are unpacked at once from neighbouring bytes; units of small blocks stay in order."""
        count = self.blocks * len(self.runs)
        if not self.is_k:
            return tuple(range(count))
        return tuple(sorted(range(count), key=lambda run: _place(*self.runs[run])))

    @property
    def registers(self) -> int:
        """Registers of sums that one row's chunk makes."""
        return (2 if self.has_integer_minimum else 1) if self.is_k else self.weights // REGISTER

    @cached_property
    def code_range(self) -> tuple[int, int]:
        """The least code, and a bound of the greatest."""
        return _range(self.block_format.codes[0])

    @property
    def is_wide(self) -> bool:
        """Whether codes need all eight bits: most instructions then multiply them with their sign, and some as code + 128."""
        least, greatest = self.code_range
        return greatest - least > 127

    def offset(self, path: str) -> int:
        """What is added to codes to make bytes without a sign of them, on an instruction path; sums of activations take it off again."""
        if self.is_wide:
            return 128 if PATHS[path].dot and not PATHS[path].signed else 0
        return -self.code_range[0]

    @property
    def is_scaled(self) -> bool:
        """Whether runs have small integer scales."""
        return self.block_format.scale.integers is not None

    @cached_property
    def planes(self) -> int:
        """Bytes with a sign that hold a code times its small scale."""
        scales = _range(self.block_format.scale.integers) if self.block_format.scale.integers else (1, 1)
        products = [code * scale for code in self.code_range for scale in scales]
        return 1 if min(products) >= -128 and max(products) <= 127 else 2

    @property
    def width(self) -> int:
        """Weights of a unit in a register, or in a row of a matrix tile, which hold at most 64 bytes."""
        return min(self.unit, REGISTER)

    def fits_words(self, codes: int, offset: int = 0) -> bool:
        """Whether a sum of this many codes plus the offset times activations has 16 bits."""
        return codes * 127 * max(abs(code + offset) for code in self.code_range) <= 32767

    def word_registers(self, path: str) -> int:
        """Registers of a run's codes whose products with activations are added up in words, two products to a word: 4 or 2 where words
        gain anything, else 0."""
        if not PATHS[path].pairs or self.is_wide:
            return 0
        return min(4, 32767 // (2 * 127 * (self.code_range[1] + self.offset(path))))

    @property
    def has_integer_minimum(self) -> bool:
        """Whether runs have small integers that count how often the minimum is subtracted."""
        minimum = self.block_format.minimum
        return minimum is not None and minimum.integers is not None

    @property
    def has_float_minimum(self) -> bool:
        """Whether a block has a minimum that multiplies rounded sums of activations."""
        return self.block_format.minimum is not None and not self.has_integer_minimum


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
