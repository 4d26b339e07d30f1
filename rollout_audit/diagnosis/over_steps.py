"""A run: |d| step by step. A jump after the first update, a saw-tooth, a steady growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_audit.diagnosis.found import Found
from rollout_audit.diagnosis.view import Floats
from rollout_audit.report import Finding

_LEAST_STEPS = 3


@dataclass(frozen=True)
class Step:
    """One training step."""

    number: int
    mean: float
    """Mean |d|."""
    error: float
    """Its standard error over rows."""
    versions: tuple[float, float] | None = None
    """Weight versions of rollout and train side, where the dumps state them."""


def over_steps(steps: Sequence[Step], bad: float) -> Found | None:
    """What the steps say together. What they say is not said again of all tokens together."""
    if len(steps) < _LEAST_STEPS:
        return None
    means = np.array([step.mean for step in steps])
    errors = np.array([step.error if math.isfinite(step.error) else 0.0 for step in steps])
    for rule in (_stale_by_design, _sync_failure, _stale_cache, _drift):
        if (finding := rule(steps, means, errors, bad)) is not None:
            return Found(finding, silences=frozenset({"different-weights", "length-amplified", "row-concentrated"}))
    return None


def _table(steps: Sequence[Step]) -> dict[str, float]:
    shown = steps if len(steps) <= 12 else [*steps[:6], *steps[-6:]]
    return {str(step.number): step.mean for step in shown}


def _stale_by_design(steps: Sequence[Step], means: Floats, errors: Floats, bad: float) -> Finding | None:
    gaps = [abs(step.versions[1] - step.versions[0]) if step.versions else math.nan for step in steps]
    late = [mean for mean, gap in zip(means, gaps, strict=True) if gap > 0]
    level = [mean for mean, gap in zip(means, gaps, strict=True) if gap == 0]
    if len(late) < 2 or any(math.isnan(gap) for gap in gaps) or not np.mean(late) > bad:
        return None
    if level and np.mean(level) > 0.5 * np.mean(late):
        return None  # as far apart where versions agree: staleness is not why
    return Finding(
        "different-weights",
        "warning",
        f"in {len(late)} of {len(steps)} steps the rollout's weights are up to {max(gaps):g} versions older than the "
        f"trainer's, by the dumps' own word: mean |log ratio| {np.mean(late):.3g} there"
        + (f" and {np.mean(level):.3g} where versions agree" if level else ""),
        {"mean_abs_stale": float(np.mean(late)), "largest_gap": max(gaps), "mean_abs_by_step": _table(steps)},
        remedy="as an asynchronous run has it by design: cap the staleness, and correct with importance sampling "
        "(rollout_is=token, a decoupled loss)",
    )


def _sync_failure(steps: Sequence[Step], means: Floats, errors: Floats, bad: float) -> Finding | None:
    for at in range(1, min(5, len(steps) - 1)):
        base, rest = means[:at], means[at:]
        if not (rest.min() > 4 * base.max() and rest.min() > 0.6 * bad and base.max() < bad):
            continue
        if rest[-1] < 0.5 * rest.max():
            continue
        return Finding(
            "sync-failure",
            "error",
            f"mean |log ratio| is {base.mean():.3g} up to step {steps[at - 1].number} and {rest[0]:.3g} from step "
            f"{steps[at].number} on ({rest[0] / base.mean():.0f} times), {rest[-1]:.3g} at the last: new weights do "
            "not reach the rollout engine",
            {"first_step": steps[at].number, "factor": float(rest[0] / base.mean()), "mean_abs_by_step": _table(steps)},
            [{"step": steps[at].number}],
            "compare checksums of weights in trainer and engine after an update; with LoRA see that the adapter is "
            "delivered (list_loras, or lora.merge=True); stale by design? then state weight versions in the dump",
        )
    return None


def _stale_cache(steps: Sequence[Step], means: Floats, errors: Floats, bad: float) -> Finding | None:
    falls = []
    for i in range(1, len(means)):
        peak = means[i - 1]
        sure = peak - means[i] > 4 * math.hypot(errors[i], errors[i - 1])
        if means[i] < 0.6 * peak and sure and peak > 0.4 * bad:
            falls.append(i)
    if not falls:
        return None
    edges = [0, *falls, len(means)]
    rising = [means[b - 1] > 1.4 * means[a] for a, b in zip(edges, edges[1:], strict=False) if b - a >= 2]
    if len(falls) < 2 and len(rising) < 2 or sum(rising) < max(2, 0.6 * len(rising)):
        return None
    numbers = [steps[i].number for i in falls]
    return Finding(
        "stale-cache",
        "error",
        f"mean |log ratio| grows and falls back at step{'s' * (len(numbers) > 1)} "
        f"{', '.join(map(str, numbers[:6]))}, up to {means.max():.3g} from {means.min():.3g}: something that is "
        "computed with old weights is kept until it is cleared",
        {"falls_at": {str(number): float(means[i]) for number, i in zip(numbers, falls, strict=True)},
         "mean_abs_by_step": _table(steps)},
        [{"step": number} for number in numbers[:5]],
        "clear prefix and KV caches with each weight update (reset_prefix_cache; NeMo RL "
        "recompute_kv_cache_after_weight_updates; prime-rl use_prefix_cache_salt), or find what a restart resets",
    )  # fmt: skip


def _drift(steps: Sequence[Step], means: Floats, errors: Floats, bad: float) -> Finding | None:
    if len(steps) < 5:
        return None
    x = np.arange(len(means), dtype=float)
    slope, start = np.polyfit(x, means, 1)
    residual = means - (slope * x + start)
    error = math.sqrt(float((residual**2).sum()) / max(1, len(x) - 2) / float(((x - x.mean()) ** 2).sum()))
    third = max(1, len(x) // 3)
    first, last = float(means[:third].mean()), float(means[-third:].mean())
    rises = float((np.diff(means) > 0).mean())
    if not (slope > 5 * error and last > 1.8 * first and rises >= 0.6 and last > 0.4 * bad):
        return None
    return Finding(
        "drift",
        "error" if last > bad else "warning",
        f"mean |log ratio| grows steadily, {first:.3g} in the first third of {len(steps)} steps and {last:.3g} in the "
        f"last, {slope:.2g} a step",
        {"first_third": first, "last_third": last, "slope": float(slope), "standard_error": error,
         "mean_abs_by_step": _table(steps)},
        [{"step": steps[-1].number}],
        "precision of the trainer (bf16 drifts), a growing share of stale rollouts, or entropy that rises: compare "
        "with a run of fp32 log-probs",
    )  # fmt: skip
