"""BitNet-rs's parity receipt: the distance of two engines' logits, by position. Its names rust and cpp stand for theirs and ours."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EmptyInputError, ShapeError
from ..whole_file import whole_file
from .logits import kl_divergence

TOP = 5


@dataclass(frozen=True)
class Thresholds:
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


def receipt(
    rows: Sequence[dict[str, Any]],
    *,
    model: str,
    backend: str,
    prompt: str,
    thresholds: Thresholds = Thresholds(),
    timestamp: str | None = None,
    **v2: Any,
) -> dict[str, Any]:
    """The receipt's JSON object from its rows.

    v2: tokenizer_authority, prompt_template, determinism_seed, model_sha256. A row passes if its mse, its kl and its top-5 agreement keep
    the thresholds (BitNet-rs itself looks at the mse only) and all of them are numbers.
    """
    if not rows:
        raise EmptyInputError("a receipt needs at least one position")
    unknown = set(v2) - {"tokenizer_authority", "prompt_template", "determinism_seed", "model_sha256"}
    if unknown:
        raise TypeError(f"receipt() got the unknown fields {sorted(unknown)}")
    first = next((i for i, row in enumerate(rows) if not _passes(row, thresholds)), None)
    mse, kl = ([row[name] for row in rows] for name in ("mse", "kl"))
    summary: dict[str, Any] = {"all_passed": first is None}
    if first is not None:
        summary["first_divergence"] = first
    summary["mean_mse"] = None if None in mse else float(np.mean(mse))
    if None not in kl:
        summary["mean_kl"] = float(np.mean(kl))
    return {
        "version": 1,  # the number that BitNet-rs writes for both; the fields of version 2 are optional
        "timestamp": timestamp or datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "backend": backend,
        "prompt": prompt,
        "positions": len(rows),
        "thresholds": {"mse": thresholds.mse, "kl": thresholds.kl, "topk": thresholds.topk},
        "rows": list(rows),
        "summary": summary,
    } | {name: value for name, value in v2.items() if value is not None}


def _passes(row: dict[str, Any], limit: Thresholds) -> bool:
    mse, kl = row["mse"], row["kl"]
    return mse is not None and kl is not None and mse <= limit.mse and kl <= limit.kl and row["topk_agree"] >= limit.topk


def write(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
    """Write a receipt as indented JSON to a file that appears only when it is complete."""
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", "utf-8")
