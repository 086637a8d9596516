"""ggml's block types, as tables: the place of each weight's bits, its scale and its minimum. The layouts are those of ggml-common.h.

A block is a run of consecutive weights of a row (32 or 256) with everything needed to compute them:

    weight[i] = scale[i // RUN] * code[i] + minimum[i // RUN]

in float32, rounded after each operation (the products are exact: at most 23 bits). Codes are small integers assembled from bits
of some bytes, 16 or 32 at a time, or integers from a table that such bits index: `Integers`. The factors by which K-quants multiply the
block's float16 are of the same kind. MXFP4 and NVFP4 have one-byte scales, which index a table of 256 numbers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RUN = 16  # weights that are computed at a time: the lanes of a register in fast/
_LANE = np.arange(RUN)
_TWO_RUNS = np.arange(2 * RUN)  # bytes of two runs take no more instructions than those of one


class Bits:
    """(byte[at] >> shift & mask) << place in each lane, with `at` counted from the block's start."""

    def __init__(self, at: ArrayLike, shift: ArrayLike = 0, mask: ArrayLike = 255, place: int = 0) -> None:
        self.at, self.shift, self.mask = (values.tolist() for values in np.broadcast_arrays(at, shift, mask))
        self.place = place


class Flags:
    """Bit number `lane` of two bytes << place, in each lane."""

    def __init__(self, at: int, place: int) -> None:
        self.at, self.place = at, place


class Digit:
    """Digit `place` of a byte that holds a base-3 fraction of 256, in each lane. Digit 0 is the first after the point."""

    def __init__(self, at: ArrayLike, place: ArrayLike) -> None:
        self.at, self.factor = (values.tolist() for values in np.broadcast_arrays(at, 3 ** np.asarray(place)))


@dataclass(frozen=True, eq=False)
class Integers:
    """16 or 32 integers: parts joined by OR, as a byte with a sign if `signed`, less `bias`; or the integers of `table` at these places."""

    parts: tuple[Bits | Flags | Digit, ...]
    bias: int = 0
    signed: bool = False
    table: tuple[int, ...] = ()  # 16 bytes with a sign, for parts of four bits; empty if there is none

    @property
    def runs(self) -> int:
        """The number of integers / 16."""
        return max((len(part.at) // RUN for part in self.parts if not isinstance(part, Flags)), default=1)

    @property
    def four_bits(self) -> Bits | None:
        """The only part, if each integer has at most four bits, all at the same place of their bytes; else None."""
        part, *others = self.parts
        if others or not isinstance(part, Bits) or len(set(part.shift)) > 1:
            return None
        return part if len(set(part.mask)) == 1 and part.mask[0] <= 15 else None


@dataclass(frozen=True)
class Factor:
    """A scale or a minimum: a float16 of the block, times one of 16 integers if the type has them; or a number of `table`."""

    half: str  # the field of the float16, or of the bytes that index the table
    integers: Integers | None = None
    lanes: tuple[int, ...] = tuple(range(RUN))  # the number of the integer, or of the byte, that each 16 weights have
    negative: bool = False
    table: tuple[float, ...] = ()  # the number that each of 256 bytes stands for; empty if the factor is a float16


@dataclass(frozen=True)
class Format:
    """One type: the bytes of a block, its codes in order, its scale, and its minimum if it has one."""

    layout: np.dtype
    codes: tuple[Integers, ...]
    scale: Factor
    minimum: Factor | None = None

    @property
    def weights(self) -> int:
        """The number of weights in a block."""
        return RUN * sum(codes.runs for codes in self.codes)

    def start(self, factor: Factor) -> int:
        """Offset of the factor's float16 in a block, in bytes."""
        return _starts(self.layout)[factor.half]

    @property
    def float16_fields(self) -> tuple[str, ...]:
        """The fields that are float16."""
        return tuple(factor.half for factor in (self.scale, self.minimum) if factor and not factor.table)


_D, _DMIN, _M = (("d", "<u2"), ("dmin", "<u2"), ("m", "<u2"))  # the bits of float16


def _starts(layout: np.dtype) -> dict[str, int]:
    """Field -> its offset in bytes."""
    return {name: field[1] for name, field in (layout.fields or {}).items()}


def _small(fields: list[tuple], bias: int = 0) -> Format:
    """32 weights: 4 low bits in qs, those of the second 16 weights in the high half of each byte; a fifth bit, if any, in qh."""
    layout = np.dtype(fields)
    start = _starts(layout)
    codes = []
    for run in range(2):
        parts: list[Bits | Flags] = [Bits(start["qs"] + _LANE, 4 * run, 15)]
        if "qh" in start:
            parts.append(Flags(start["qh"] + 2 * run, place=4))
        codes.append(Integers(tuple(parts), bias))
    return Format(layout, tuple(codes), Factor("d"), Factor("m") if "m" in start else None)


def _two_bits(qs: int, n: int) -> Bits:
    """The codes of weights 32 n to 32 n + 31: 2 bits, low ones first, of 32 bytes for each 128 weights."""
    return Bits(qs + n // 4 * 32 + _TWO_RUNS, n % 4 * 2, 3)


def _q2_k() -> Format:
    layout = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN])
    codes = tuple(Integers((_two_bits(16, n),)) for n in range(8))
    scale, minimum = (Integers((Bits(_LANE, shift, 15),)) for shift in (0, 4))
    return Format(layout, codes, Factor("d", scale), Factor("dmin", minimum, negative=True))


def _q3_k() -> Format:
    layout = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), _D])
    # a clear high bit subtracts 4
    codes = tuple(Integers((_two_bits(32, n), Bits(_TWO_RUNS, n, 1, place=2)), bias=4) for n in range(8))
    low, high = Bits(96 + _LANE % 8, _LANE // 8 * 4, 15), Bits(104 + _LANE % 4, _LANE // 4 * 2, 3, place=4)
    return Format(layout, codes, Factor("d", Integers((low, high), bias=32)))


def _q4_k_or_q5_k(fields: list[tuple]) -> Format:
    """Scales and minimums have 6 bits, one for 32 weights: the first four lie whole, the others' upper 2 bits above those."""
    layout = np.dtype([_D, _DMIN, ("scales", "u1", 12), *fields])
    start = _starts(layout)
    group, kind = np.divmod(_LANE, 2)  # scales in the even lanes, minimums in the odd ones
    first = group < 4
    whole_or_high = Bits(4 + 4 * kind + group % 4, np.where(first, 0, 2), np.where(first, 63, 48))
    six_bits = Integers((whole_or_high, Bits(12 + group % 4, 4 * kind, np.where(first, 0, 15))))
    even, odd = (tuple((_LANE // 2 * 2 + n).tolist()) for n in (0, 1))
    codes = []
    for n in range(8):
        parts = [Bits(start["qs"] + n // 2 * 32 + _TWO_RUNS, n % 2 * 4, 15)]
        if "qh" in start:
            parts.append(Bits(start["qh"] + _TWO_RUNS, n, 1, place=4))
        codes.append(Integers(tuple(parts)))
    return Format(layout, tuple(codes), Factor("d", six_bits, even), Factor("dmin", six_bits, odd, negative=True))


def _q6_k() -> Format:
    layout = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D])
    codes = []
    for n in range(8):
        half, rest = divmod(n, 4)
        low = Bits(half * 64 + rest % 2 * 32 + _TWO_RUNS, rest // 2 * 4, 15)
        high = Bits(128 + half * 32 + _TWO_RUNS, rest * 2, 3, place=4)
        codes.append(Integers((low, high), bias=32))
    return Format(layout, tuple(codes), Factor("d", Integers((Bits(192 + _LANE),), signed=True)))


def _tq1_0() -> Format:
    """Five base-3 digits in each byte, four in the last four bytes."""
    layout = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), _D])
    digits = [Digit(run % 2 * 16 + _LANE, run // 2) for run in range(10)]
    digits += [Digit(32 + _LANE, place) for place in range(5)]
    digits += [Digit(48 + _LANE % 4, _LANE // 4)]
    return Format(layout, tuple(Integers((digit,), bias=1) for digit in digits), Factor("d"))


def _q2_0(weights: int) -> Format:
    """Four neighbours in a byte."""
    layout = np.dtype([_D, ("pairs", "u1", weights // 4)])
    codes = (Bits(2 + 8 * n + _TWO_RUNS // 4, 2 * (_TWO_RUNS % 4), 3) for n in range(weights // 32))
    return Format(layout, tuple(Integers((bits,), bias=1) for bits in codes), Factor("d"))


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # kvalues_iq4nl
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # floats of one mantissa bit, doubled: kvalues_mxfp4
_E8M0_HALVED = tuple(2.0 ** (byte - 128) for byte in range(256))  # powers of two, and half of each because codes are doubled


def _halved_e4m3(byte: int) -> float:
    """Half of a float of four exponent and three mantissa bits, as ggml_ue4m3_to_fp32 has it: the sign is not looked at, 127 is 0."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    return 0.0 if byte == 127 else 0.5 * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _nibbles(qs: int, table: tuple[int, ...]) -> tuple[Integers, Integers]:
    """32 codes of four bits in 16 bytes: the first 16 in the low halves, the others in the high ones."""
    low, high = (Integers((Bits(qs + _LANE, shift, 15),), table=table) for shift in (0, 4))
    return low, high


def _iq4_xs() -> Format:
    """Scales have 6 bits, one for 32 weights: 4 low bits in scales_l, 2 high ones in scales_h."""
    layout = np.dtype([_D, ("scales_h", "u1", 2), ("scales_l", "u1", 4), ("qs", "u1", 128)])
    group = _LANE // 2
    six_bits = Integers((Bits(4 + group // 2, group % 2 * 4, 15), Bits(2 + group // 4, group % 4 * 2, 3, place=4)), bias=32)
    codes = tuple(run for n in range(8) for run in _nibbles(8 + 16 * n, _IQ4))
    return Format(layout, codes, Factor("d", six_bits))


def _nvfp4() -> Format:
    """A scale for 16 weights: the first eight lie in the low halves of eight bytes, the others in the high halves."""
    layout = np.dtype([("d", "u1", 4), ("qs", "u1", 32)])
    codes = tuple(Integers((Bits(4 + 8 * run + _LANE % 8, _LANE // 8 * 4, 15),), table=_E2M1) for run in range(4))
    return Format(layout, codes, Factor("d", table=tuple(map(_halved_e4m3, range(256)))))


# kernels tell formats apart by their fields
FORMATS = {
    "Q4_0": _small([_D, ("qs", "u1", 16)], bias=8),
    "Q4_1": _small([_D, _M, ("qs", "u1", 16)]),
    "Q5_0": _small([_D, ("qh", "u1", 4), ("qs", "u1", 16)], bias=16),
    "Q5_1": _small([_D, _M, ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": Format(np.dtype([_D, ("qs", "i1", 32)]), (Integers((Bits(2 + _TWO_RUNS),), signed=True),), Factor("d")),
    "Q2_K": _q2_k(),
    "Q3_K": _q3_k(),
    "Q4_K": _q4_k_or_q5_k([("qs", "u1", 128)]),
    "Q5_K": _q4_k_or_q5_k([("qh", "u1", 32), ("qs", "u1", 128)]),
    "Q6_K": _q6_k(),
    "TQ1_0": _tq1_0(),
    "TQ2_0": Format(np.dtype([("qs", "u1", 64), _D]), tuple(Integers((_two_bits(0, n),), bias=1) for n in range(8)), Factor("d")),
    # a set bit is +1, a clear one -1
    "Q1_0": Format(
        np.dtype([_D, ("bits", "u1", 16)]), tuple(Integers((Flags(2 + 2 * run, place=1),), bias=1) for run in range(8)), Factor("d")
    ),
    "Q2_0": _q2_0(64),
    "PQ2_0": _q2_0(128),
    "IQ4_NL": Format(np.dtype([_D, ("nl", "u1", 16)]), _nibbles(2, _IQ4), Factor("d")),  # "nl", because Q4_0 has the same bytes
    "IQ4_XS": _iq4_xs(),
    "MXFP4": Format(np.dtype([("e", "u1"), ("qs", "u1", 16)]), _nibbles(1, _E2M1), Factor("e", lanes=(0,) * RUN, table=_E8M0_HALVED)),
    "NVFP4": _nvfp4(),
}
