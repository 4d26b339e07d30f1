"""How much is left, against what is healthy; and whether rows are just too long for a product of ratios."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout_audit.diagnosis.found import Found
from rollout_audit.diagnosis.view import View
from rollout_audit.errors import AuditError
from rollout_audit.report import Finding

KINDS = ("dense", "moe", "quantised")
_HEALTHY_TOKEN = 0.03
"""Mean |d| up to which it is length, and not the mismatch, that spoils a row's product."""
_OUTLIER = 12
"""Times the median |d| that a token counts at most when the rows' lengths are blamed."""
_FILE = Path(__file__).parent / "bands.json"


@dataclass(frozen=True)
class Band:
    """What is healthy (up to `ok`), to be watched (up to `bad`), and faulty, of one metric."""

    metric: str
    ok: float
    bad: float
    source: str
    higher_is_better: bool = False

    def state(self, value: float | None) -> str:
        if value is None or math.isnan(value):
            return "unknown"
        sign = -1.0 if self.higher_is_better else 1.0
        if sign * value <= sign * self.ok:
            return "ok"
        return "watch" if sign * value <= sign * self.bad else "bad"


def load_bands(kind: str, path: str | None = None) -> dict[str, Band]:
    """The bands of a kind of model; a file of the user's overrides them, metric by metric.

    Raises AuditError for a file that is not such a table.
    """
    bands = json.loads(_FILE.read_text())
    if path is not None:
        try:
            mine = json.loads(Path(path).read_text())
            for name, table in mine.items():
                for metric, band in table.items():
                    merged = bands[name].get(metric, {}) | band
                    Band(metric, float(merged["ok"]), float(merged["bad"]), str(merged.get("source", path)))
                    bands[name][metric] = merged | {"source": band.get("source", path)}
        except OSError as exc:
            raise AuditError(f"cannot be read: {exc.strerror}", path=path) from None
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise AuditError(
                f"not a file of bands ({type(exc).__name__}: {exc})",
                path=path,
                wanted='{"dense": {"log_prob_diff_abs_mean": {"ok": 0.02, "bad": 0.05, "source": "..."}}}, for dense, '
                "moe or quantised",
            ) from None
    return {
        metric: Band(metric, band["ok"], band["bad"], band["source"], band.get("higher_is_better", False))
        for metric, band in bands[kind].items()
    }


def different_weights(view: View, band: Band, versions: tuple[float, float] | None) -> Found | None:
    """More than noise, everywhere and on both sides of 0: other weights, or another precision.

    `versions` are those of rollout and train side, where the dump states them.
    """
    if not view.size:
        return None
    mean, se = view.mean(np.minimum(view.size_of_d, 10.0))
    state = band.state(mean)
    sure = mean - 2 * se > band.bad if np.isfinite(se) else view.size >= 200
    if state == "ok" or (state == "watch") or not sure:
        if state in ("watch", "bad"):
            return Found(
                Finding(
                    "different-weights",
                    "info",
                    f"mean |log ratio| {mean:.3g} (standard error {se:.1g}) is above the healthy {band.ok:g}, "
                    + ("not beyond" if state == "watch" else "and not surely beyond")
                    + f" {band.bad:g}: watch it ({band.source})",
                    {"mean_abs": mean, "standard_error": se, "ok": band.ok, "bad": band.bad},
                    remedy="compare with the first steps of the run; if it grows, look at weight sync and precision",
                ),
                view,
            )
        return None
    ratio, se_ratio = view.mean_ratio()
    stale = versions is not None and versions[0] != versions[1]
    pearson = float(np.corrcoef(view.old, view.rollout)[0, 1]) if view.size > 2 else float("nan")
    told = ""
    if stale and versions is not None:
        told = f"; by the dump's own word the rollout's weights are version {versions[0]:g} and the trainer's "
        told += f"{versions[1]:g}: stale by design?"
    return Found(
        Finding(
            "different-weights",
            "warning" if stale else "error",
            f"mean |log ratio| is {mean:.3g} (healthy: {band.ok:g}, {band.source}), everywhere and on both sides of 0, "
            f"with mean ratio {ratio:.4g}: the two sides hold different weights or another precision{told}",
            {
                "mean_abs": mean,
                "standard_error": se,
                "ok": band.ok,
                "bad": band.bad,
                "mean_ratio": ratio,
                "share_positive": float((view.d > 0).mean()),
                "log_prob_pearson": pearson,
            }
            | ({"rollout_version": versions[0], "train_version": versions[1]} if versions else {}),
            [view.place(r) for r in view.worst_rows(view.row_mean(view.size_of_d), 3)],
            "at step 0: conversion or precision (compare checksums of weights; a quantised rollout needs --expect "
            "quantised and importance sampling); later: weight sync, LoRA delivery, stale rollouts",
        ),
        view,
    )


def length_amplified(view: View, sums: dict[str, Any]) -> Found | None:
    """Tokens are healthy, and the product of their ratios over a row is useless all the same."""
    rows = view.lengths > 0
    mean = float(view.size_of_d.mean()) if view.size else math.nan
    if not mean <= _HEALTHY_TOKEN or rows.sum() < 8:
        return None
    total = np.bincount(view.row, weights=view.d, minlength=len(view.places))[rows]
    length = view.lengths[rows].astype(float)
    # Rows that were cut for the sample are longer than what is seen of them.
    scaled = total * np.sqrt(view.full_length[rows] / length)
    beyond = float((np.abs(scaled) > math.log(2)).mean())
    ess = sums.get("ess_sequences")
    held = np.clip(view.d, -_OUTLIER * view.typical, _OUTLIER * view.typical)
    alone = np.bincount(view.row, weights=held, minlength=len(view.places))[rows]
    by_length = float((np.abs(alone * np.sqrt(view.full_length[rows] / length)) > math.log(2)).mean())
    # Not by a few tokens that are far off: then it is those that are at fault.
    if not (min(beyond, by_length) > 0.6 and float(np.mean(length)) >= 50):
        return None
    bias = float(view.d.mean())
    noise = float(np.median(np.abs(scaled - bias * view.full_length[rows])))
    return Found(
        Finding(
            "length-amplified",
            "warning",
            f"tokens are healthy (mean |log ratio| {mean:.3g}), yet the product of ratios lies outside 1/2 to 2 in "
            f"{beyond:.0%} of rows of {np.mean(view.full_length[rows]):.0f} tokens: it is the estimator, not the "
            "mismatch",
            {
                "share_of_rows_beyond_2": beyond,
                "mean_abs": mean,
                "mean_log_ratio": bias,
                "mean_length": float(np.mean(view.full_length[rows])),
                "median_abs_row_sum_without_bias": noise,
                "ess_sequences": ess,
            },
            remedy="weight tokens, not sequences (rollout_is=token), or reject by the geometric mean "
            "(rollout_rs=seq_mean_k1 or seq_mean_k3)",
        ),
        view,
    )
