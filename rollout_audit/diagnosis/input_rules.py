"""What is wrong with the input itself: values that are no log-probs, masks, empty rows, copies, dumped weights."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_audit.config import Settings
from rollout_audit.metrics.coverage import Coverage, WeightsCheck, places_as_dicts
from rollout_audit.metrics.debug import DebugCompare
from rollout_audit.metrics.offpolicy import OffPolicy
from rollout_audit.report import Finding

_POSITIVE = 1e-3
"""Log-probs above this are no rounding of 0; below, bf16 and fp16 leave such values at confident tokens."""


def input_findings(
    coverage: Coverage, offpolicy: OffPolicy | None, debug: DebugCompare | None, weights: WeightsCheck | None
) -> Iterator[Finding]:
    """All findings about the input, most important first."""
    if coverage.num_nonfinite:
        yield _non_finite(coverage)
    yield from _positive_log_prob(coverage)
    if coverage.num_not_binary:
        yield Finding(
            "mask-not-binary",
            "error",
            f"{coverage.num_not_binary:,} mask values are neither 0 nor 1; every value but 0 was counted as valid",
            {"values": coverage.num_not_binary},
            remedy="verl multiplies by the mask, so such values weight tokens: dump the 0/1 loss mask",
        )
    log_ratio_range = offpolicy.tokens.log_ratio_range if offpolicy else debug.log_ratio_range if debug else None
    if log_ratio_range is not None and log_ratio_range.min == 0 == log_ratio_range.max and coverage.num_tokens > 1:
        yield Finding(
            "identical",
            "warning",
            f"rollout and train log-probs are equal at all {coverage.num_tokens:,} tokens: nothing can be audited",
            {"tokens": coverage.num_tokens},
            remedy="if old_log_probs was copied from the rollout (bypass mode), dump the log-probs of a training "
            "forward pass; only a bitwise consistent stack is equal without a copy",
        )
    if coverage.num_empty:
        effect = (
            "verl counts them as weight 0 and perplexity 1; audited values leave them out"
            if offpolicy
            else "nothing here depends on them, but verl's sequence means in rollout_corr/ do"
        )
        yield Finding(
            "empty-rows",
            "warning",
            f"{coverage.num_empty:,} of {coverage.num_rows:,} sequences have no valid token: {effect}",
            {"empty_sequences": coverage.num_empty, "sequences": coverage.num_rows},
            [
                {"path": path, "empty_sequences": counts.empty_rows}
                for path, counts in coverage.files.items()
                if counts.empty_rows
            ],
            "read sequence means from `audited`; look for aborted rollouts or a rejection that emptied rows",
        )
    if weights is not None and weights.disagree:
        yield _weights_disagree(weights, weights.settings)


def _non_finite(coverage: Coverage) -> Finding:
    fields = ", ".join(f"{name} {count:,}" for name, count in sorted(coverage.nonfinite.items()))
    return Finding(
        "non-finite",
        "error",
        f"{coverage.num_nonfinite:,} of {coverage.num_tokens:,} valid tokens are NaN or infinite ({fields})",
        {"tokens": coverage.num_nonfinite, "fields": dict(coverage.nonfinite)},
        places_as_dicts(coverage.nonfinite_places),
        "metrics show what verl makes of them, audited values are over finite tokens; compute log_softmax in float32 "
        "and find the rows above in the engine's logs",
    )


def _positive_log_prob(coverage: Coverage) -> Iterator[Finding]:
    for name, extremes in (("rollout_log_probs", coverage.rollout_range), ("old_log_probs", coverage.old_range)):
        if extremes.max > _POSITIVE:
            yield Finding(
                "positive-log-prob",
                "error",
                f"{name} goes up to {extremes.max:.4g}: a log-prob is at most 0",
                {"field": name, "max": extremes.max},
                remedy="dump natural log-probs, not probabilities or negated values; a filler of 1.0 belongs outside "
                "the mask",
            )


def _weights_disagree(check: WeightsCheck, settings: Settings) -> Finding:
    share = check.num_disagree / check.num_checked
    if settings.rollout_is_batch_normalize:
        summary = (
            f"dumped rollout_is_weights are not one multiple of the recomputed ones: dumped / recomputed runs "
            f"from {check.quotient.min:.6g} to {check.quotient.max:.6g}"
        )
    else:
        summary = (
            f"dumped rollout_is_weights differ from the recomputed ones at {check.num_disagree:,} of "
            f"{check.num_checked:,} tokens ({share:.1%})"
        )
    return Finding(
        "weights-disagree",
        "warning",
        summary,
        {
            "disagreeing_tokens": check.num_disagree,
            "tokens": check.num_checked,
            "tolerance": check.tolerance,
            "dumped_min": check.dumped_range.min,
            "dumped_max": check.dumped_range.max,
            "quotient_min": check.quotient.min,
            "quotient_max": check.quotient.max,
        },
        places_as_dicts(check.worst),
        f"give the settings of the run (--rollout-is, --rollout-is-threshold: dumped weights lie in "
        f"[{check.dumped_range.min:.4g}, {check.dumped_range.max:.4g}]; --rollout-is-batch-normalize); if they are "
        "right already, the trainer weighted with other log-probs than it dumped",
    )
