"""The order of the rules: what the input is, which token belongs to which, what the sampler did, where and how much.

A fault that was found is undone, and the rest is looked at again: faults stack. What a rule finds silences those that
would only say the same in other words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rollout_audit.diagnosis import concentration, sampling, values
from rollout_audit.diagnosis.alignment import alignment
from rollout_audit.diagnosis.found import Found, Unsure
from rollout_audit.diagnosis.magnitude import Band, different_weights, length_amplified
from rollout_audit.diagnosis.over_steps import Step, over_steps
from rollout_audit.diagnosis.view import View
from rollout_audit.report import Finding

_ORDER = (
    "left-out", "incomplete-steps", "non-finite", "mask-not-binary", "missing-side", "identical",
    "not-log-probs", "filler", "positive-log-prob", "shifted", "row-offset", "rows-permuted",
    "blocks-permuted", "sync-failure", "stale-cache", "drift", "temperature", "penalty", "truncated-sampling",
    "turn-start", "version-switch", "position-growth", "row-concentrated", "sparse-outliers",
    "different-weights", "length-amplified", "weights-disagree", "empty-rows", "coarse-grid",
)  # fmt: skip
"""Most telling first, within a severity."""
_SEVERITIES = ("error", "warning", "info")
VERDICTS = ("healthy", "watch", "faulty", "cannot-audit")
_FEW_ROWS, _FEW_TOKENS = 8, 200


@dataclass
class Diagnosis:
    """What is wrong, and how much of the difference it accounts for."""

    verdict: str
    findings: list[Finding]
    unsure: list[Unsure] = field(default_factory=list)
    remaining: float | None = None
    """Mean |d| of what is left when all that could be undone is undone."""
    looked_at: dict[str, int] = field(default_factory=dict)
    """Rows and tokens that were looked at one by one, of how many."""


@dataclass
class Evidence:
    """All that the rules rest on."""

    view: View | None
    known: list[Finding]
    """What counting has found: the input's own faults."""
    bands: dict[str, Band]
    metrics: dict[str, Any]
    """Audited values of the whole batch."""
    missing: str = ""
    """Which log-probs the dump lacks, in words."""
    steps: Sequence[Step] = ()
    versions: tuple[float, float] | None = None


def diagnose(evidence: Evidence) -> Diagnosis:
    """Findings, most important first, and the verdict."""
    view, known = evidence.view, list(evidence.known)
    cannot = view is None or any(finding.code == "identical" for finding in known)
    if view is None:
        known.append(_missing_side(evidence))
    found: list[Found] = []
    unsure: list[Unsure] = []
    left = view
    if view is not None and view.size and not cannot:
        with np.errstate(all="ignore"):  # what has no spread has no correlation: NaN, which is told as null
            left = _apply(view, evidence, found, unsure)
    findings = [_explained(item, view) for item in found]
    silenced = {code for item in found for code in item.silences}
    findings += [finding for finding in known if finding.code not in silenced]
    findings = [replace(f, settings=REMEDIES.get(f.code, {})) for f in findings]
    findings.sort(key=lambda f: (_SEVERITIES.index(f.severity), _ORDER.index(f.code)))
    return Diagnosis(
        "cannot-audit" if cannot else _verdict(findings, evidence),
        findings,
        unsure,
        float(left.size_of_d.mean()) if left is not None and left.size else None,
        {
            "sequences": len(view.places),
            "of_sequences": view.num_rows,
            "tokens": view.size,
            "of_tokens": view.num_tokens,
        }
        if view is not None
        else {},
    )


def _missing_side(evidence: Evidence) -> Finding:
    return Finding(
        "missing-side",
        "warning",
        f"{evidence.missing or 'there is no valid token'}: there is nothing to compare",
        remedy="dump rollout_log_probs and old_log_probs of the same tokens, with their response_mask",
    )


def _apply(view: View, evidence: Evidence, found: list[Found], unsure: list[Unsure]) -> View:
    """Every rule in its turn, each on what the ones before have left; answers what is left in the end."""
    band = evidence.bands["log_prob_diff_abs_mean"]
    silenced: set[str] = set()
    before: dict[int, float] = {}

    def take(item: Found | Unsure | None) -> None:
        nonlocal view
        if isinstance(item, Unsure):
            unsure.append(item)
        elif item is not None and item.finding.code not in silenced:
            silenced.update(item.silences)
            before[id(item)] = float(view.size_of_d.sum())
            item.explains = _share(item, view, whole)
            found.append(item)
            view = item.left if item.left is not None else view

    whole = float(view.size_of_d.sum())

    def ask(rule: Callable[[View], Found | Unsure | None]) -> None:
        if view.size:  # nothing may be left
            take(rule(view))

    ask(values.not_log_probs)
    grid = values.coarse_grid(view)
    full = view
    ask(values.filler)
    for item in alignment(view):
        take(item)
    _withdraw_filler(full, found)
    if (run := over_steps(evidence.steps, band.bad)) is not None:
        take(run)
    if view.filled < _FEW_ROWS or view.size < _FEW_TOKENS:
        unsure.append(
            Unsure(
                "sampler settings and places",
                f"{view.filled} rows and {view.size:,} tokens are looked at; from {_FEW_ROWS} rows and {_FEW_TOKENS} "
                "tokens on, temperature, truncation, penalties, change-points and rows apart can be told",
            )
        )
    else:
        rules: tuple[Callable[[View], Found | Unsure | None], ...] = (
            partial(concentration.turn_start, bad=band.bad),
            sampling.penalty,
            sampling.temperature,
            sampling.truncated_sampling,
            partial(concentration.position_growth, bad=band.bad),
            partial(concentration.version_switch, bad=band.bad),
            partial(concentration.row_concentrated, bad=band.bad),
            partial(concentration.sparse_outliers, bad=band.bad),
        )
        for rule in rules:
            ask(rule)
    if "different-weights" not in silenced:
        ask(partial(different_weights, band=band, versions=evidence.versions))
    if "length-amplified" not in silenced and not any(f.finding.severity != "info" for f in found):
        ask(partial(length_amplified, sums=evidence.metrics))
    take(grid)
    return view


def _share(item: Found, view: View, whole: float) -> float | None:
    """Of all |d| there was, what goes away with this fault."""
    if item.explains is not None or item.left is None or item.left is view or not whole:
        return item.explains
    return max(0.0, float(view.size_of_d.sum() - item.left.size_of_d.sum()) / whole)


def _withdraw_filler(full: View, found: list[Found]) -> None:
    """Where rows were shifted or exchanged, what they left behind is padding, and no filler."""
    codes = {item.finding.code for item in found}
    moved = codes & {"shifted", "row-offset", "rows-permuted"}
    for item in [item for item in found if item.finding.code == "filler" and moved]:
        share = item.finding.evidence.get("share_at_ends", 0.0)
        values_of = item.finding.evidence["values"]
        if share > 0.95 and all(name.endswith(" 0") for name in values_of):
            found.remove(item)


def _explained(item: Found, view: View | None) -> Finding:
    explains = item.explains
    return item.finding if explains is None else replace(item.finding, explains=round(min(1.0, explains), 6))


def _verdict(findings: Sequence[Finding], evidence: Evidence) -> str:
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return "faulty"
    if "warning" in severities or any(state == "watch" or state == "bad" for state in states(evidence).values()):
        return "watch"
    return "healthy"


def states(evidence: Evidence) -> dict[str, str]:
    """ok, watch or bad for each metric that has a band."""
    return {metric: band.state(evidence.metrics.get(metric)) for metric, band in evidence.bands.items()}


def versions_of(inputs: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Weight versions of rollout and train side, where every file states the same."""
    pairs = set()
    for item in inputs:
        metadata = item.get("metadata", {})
        try:
            pairs.add((float(metadata["rollout_weight_version"]), float(metadata["train_weight_version"])))
        except (KeyError, ValueError):
            return None
    only = next(iter(pairs)) if len(pairs) == 1 else None
    return only if only is None or all(math.isfinite(x) for x in only) else None


REMEDIES: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "remedies.json").read_text())
"""What to set, by finding and framework."""
