"""BitNet-rs's parity receipt: the distance of two engines' logits, by position. Its names rust and cpp stand for theirs and ours.

In a row kl and topk_agree may be absent, as its `parity-both` leaves both out: an absent number was not measured, and null was NaN.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.errors import EmptyInputError, FileFormatError, ShapeError, shown
from ..base.whole_file import whole_file
from ..files.safetensors_file import json_of
from .measures import kl_divergence

TOP = 5
_LARGEST = 1 << 26  # bytes of a file: some 300,000 positions


class Thresholds(NamedTuple):
    """BitNet-rs's own defaults."""

    mse: float = 1e-4
    kl: float = 0.1
    topk: float = 0.8


def positions(ours: NDArray, theirs: NDArray) -> list[dict[str, Any]]:
    """The rows of a receipt from logits [T, V] of two engines. Numbers that are not finite become null."""
    if ours.shape != theirs.shape or ours.ndim != 2 or 0 in ours.shape:
        raise ShapeError(f"logits have shapes {list(ours.shape)} and {list(theirs.shape)}, expected [T, V] twice")
    rows = []
    for pos, (true, other) in enumerate(zip(ours.astype(np.float64), theirs.astype(np.float64), strict=True)):
        with np.errstate(all="ignore"):  # the numbers are another engine's
            error = np.abs(true - other)
            kl = float(kl_divergence(true[None], other[None])[0])
        top = [np.argsort(-x, kind="stable")[:TOP].tolist() for x in (other, true)]
        rows.append(
            {
                "pos": pos,
                "mse": _number(float(np.square(error).mean())),
                "max_abs": _number(float(error.max())),
                "kl": _number(kl),
                "topk_agree": len(set(top[0]) & set(top[1])) / len(top[1]),
                "top5_rust": top[0],
                "top5_cpp": top[1],
            }
        )
    return rows


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def receipt(rows: Sequence[dict[str, Any]], *, model: str, backend: str, prompt: str) -> dict[str, Any]:
    """The receipt's JSON object from its rows.

    A row passes if its mse, its kl and its top-5 agreement keep the thresholds (BitNet-rs itself looks at the mse only) and all of them are
    numbers.
    """
    if not rows:
        raise EmptyInputError("a receipt needs at least one position")
    limit = Thresholds()
    first = next((i for i, row in enumerate(rows) if not passes(row, limit)), None)
    mse, kl = ([row[name] for row in rows] for name in ("mse", "kl"))
    divergence = {} if first is None else {"first_divergence": first}
    mean_kl = {} if None in kl else {"mean_kl": float(np.mean(kl))}
    return {
        "version": 1,  # the number that BitNet-rs writes for both; the fields of version 2 are optional
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "backend": backend,
        "prompt": prompt,
        "positions": len(rows),
        "thresholds": limit._asdict(),
        "rows": list(rows),
        "summary": {"all_passed": first is None} | divergence | {"mean_mse": None if None in mse else float(np.mean(mse))} | mean_kl,
    }


MEASURED = {"mse": "mse", "kl": "kl", "topk_agree": "topk"}
"""The numbers of a row that have a threshold, and its name."""


def passes(row: dict[str, Any], limit: Thresholds, measured: Iterable[str] = MEASURED) -> bool:
    """Whether those of a row's numbers that were measured are numbers, and keep their thresholds."""
    most = {name: getattr(limit, threshold) for name, threshold in MEASURED.items() if name in measured}
    return all(row[name] is not None and (row[name] >= x if name == "topk_agree" else row[name] <= x) for name, x in most.items())


def write(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
    """Write a receipt as indented JSON to a file that appears only when it is complete."""
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", "utf-8")


def read(path: str | os.PathLike[str]) -> tuple[Thresholds, list[dict[str, Any]]]:
    """The thresholds and rows of a receipt's file; a row has what was measured of it.

    Raises FileFormatError for a file that is none, whose rows are not one for each position from 0 on, or whose summary says that all
    passed where the mse of a row, which is all that BitNet-rs looks at, does not keep its threshold.
    """
    value = _member(json_of(Path(path), _LARGEST), dict, path)
    limits, summary = (_member(value.get(name), dict, f"{path}: {name}") for name in ("thresholds", "summary"))
    thresholds = Thresholds(**{name: _finite(limits.get(name), f"{path}: thresholds: {name}") for name in ("mse", "kl", "topk")})
    rows = []
    for i, row in enumerate(_member(value.get("rows"), list, f"{path}: rows")):
        where = f"{path}: row {i}"
        row = _member(row, dict, where)
        if row.get("pos") != i:
            raise FileFormatError(f"{where}: pos is {shown(row.get('pos'))}, expected {i}")
        measured = [name for name in MEASURED if name in row or name == "mse"]
        numbers = {name: None if row.get(name) is None else _finite(row[name], f"{where}: {name}") for name in measured}
        rows.append(numbers | {"pos": i})
    if not rows or value.get("positions") != len(rows):
        raise FileFormatError(f"{path}: positions is {shown(value.get('positions'))}, and there are {len(rows)} rows")
    beyond = next((row for row in rows if row["mse"] is None or row["mse"] > thresholds.mse), None)
    if summary.get("all_passed") and beyond is not None:
        raise FileFormatError(
            f"{path}: the summary says that all positions passed; the mse of position {beyond['pos']} is {beyond['mse']}, "
            f"the threshold {thresholds.mse}"
        )
    if not any(passes(row, thresholds, row) for row in rows):
        raise FileFormatError(f"{path}: no position passed in it, expected one at least: it holds nothing to its thresholds")
    return thresholds, rows


def _member(value: Any, kind: type, where: object) -> Any:
    if not isinstance(value, kind):
        raise FileFormatError(f"{where} is {shown(value)}, expected a JSON {'object' if kind is dict else 'array'}")
    return value


def _finite(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise FileFormatError(f"{where} is {shown(value)}, expected a finite number")
    return float(value)
