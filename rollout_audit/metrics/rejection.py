"""Rejection sampling: each rule's statistic and what it rejects, all rules together, and what is left.

verl 0.9.1: compute_rollout_rejection_mask and compute_rs_metrics (verl/trainer/ppo/rollout_corr_helper.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_audit.batch import Batch
from rollout_audit.config import RejectionRule
from rollout_audit.kernels.denominator import guarded_count, row_fraction, token_fraction
from rollout_audit.kernels.rejection import LEVELS, keeps
from rollout_audit.kernels.sequence import to_tokens
from rollout_audit.metrics.family import merge_fields
from rollout_audit.metrics.offpolicy import TokenDivergence
from rollout_audit.metrics.roundoff import Layout, guarded_std
from rollout_audit.report import AFTER, KEPT_TOKENS, SEQUENCES, Audited, Section
from rollout_audit.stats import Extremes, Fraction, Moments


@dataclass
class RuleStatistics:
    """One rule: its statistic over tokens (a sequence's counts once for each of its tokens) and over rows."""

    rule: RejectionRule
    tokens: Moments = field(default_factory=Moments)
    bounded: Moments = field(default_factory=Moments)
    """The statistic within the rule's band."""
    token_range: Extremes = field(default_factory=Extremes)
    token_high: Fraction = field(default_factory=Fraction)
    token_low: Fraction = field(default_factory=Fraction)
    rows: Moments = field(default_factory=Moments)
    row_range: Extremes = field(default_factory=Extremes)
    row_high: Fraction = field(default_factory=Fraction)
    row_low: Fraction = field(default_factory=Fraction)
    rejected: Fraction = field(default_factory=Fraction)
    rejected_rows: Fraction = field(default_factory=Fraction)

    def update(self, batch: Batch) -> Tensor:
        """Takes a chunk and answers which of its tokens the rule keeps."""
        rule = self.rule
        low, high = rule.band
        statistic_N = batch.clamped_divergence(rule.estimator)
        if rule.level == "token":
            values, copies = statistic_N, None
            row_R = batch.row_means(statistic_N)
            kept_N = keeps(statistic_N, rule.low, rule.high)
            rejected_R = batch.row_counts(~kept_N) > 0
        else:
            copies = batch.lengths_R
            values = row_R = LEVELS[rule.level](statistic_N, batch.rows, batch.divisor_R)
            kept_R = keeps(row_R, rule.low, rule.high)
            rejected_R = ~kept_R
            kept_N = to_tokens(kept_R, batch.rows).to(statistic_N.device)
        self.tokens.update(values, copies)
        self.bounded.update(values.clamp(low, high), copies)
        self.rows.update(row_R)
        self.row_range.update(row_R)
        self.row_high.update(row_R > high)
        self.row_low.update(row_R < low)
        if rule.level == "token":
            self.token_range.update(statistic_N)
            self.token_high.update(statistic_N > high)
            self.token_low.update(statistic_N < low)
        self.rejected.update(~kept_N)
        self.rejected_rows.update(rejected_R)
        return kept_N

    def merge(self, other: RuleStatistics) -> None:
        merge_fields(self, other)

    def verl(self, num_tokens: int, mask_dtype: torch.dtype, layout: Layout) -> dict[str, float]:
        by_token, has_low = self.rule.level == "token", self.rule.low is not None
        divisor = guarded_count(num_tokens, mask_dtype)
        rows = int(self.rows.count)
        high, low = row_fraction(self.row_high.hits, rows), row_fraction(self.row_low.hits, rows)
        extremes = self.token_range if by_token else self.row_range
        metrics = {
            "mean": self.tokens.total / divisor,
            "max": extremes.max,
            "min": extremes.min,
            "fraction_high": token_fraction(self.token_high.hits, num_tokens, mask_dtype) if by_token else high,
            "fraction_low": 0.0,
            "std": guarded_std(self.bounded, divisor, layout, extremes, self.rule.band) if num_tokens > 1 else 0.0,
            "seq_mean": self.rows.mean,
            "seq_std": self.rows.std(ddof=1) if rows > 1 else 0.0,
            "seq_max": self.row_range.max,
            "seq_min": self.row_range.min,
            "seq_max_deviation": self.row_range.max_deviation(0.0),
            "seq_fraction_high": high,
        }
        if has_low:
            metrics["fraction_low"] = token_fraction(self.token_low.hits, num_tokens, mask_dtype) if by_token else low
            metrics["seq_fraction_low"] = low
        metrics["masked_fraction"] = self.rejected.hits / divisor
        metrics["seq_masked_fraction"] = self.rejected_rows.value
        return {f"rollout_rs_{self.rule.option}_{key}": value for key, value in metrics.items()}


@dataclass
class Rejection:
    """All rules of the settings, what they reject together, and the divergence of what they keep."""

    rules: list[RuleStatistics]
    rejected: Fraction = field(default_factory=Fraction)
    rejected_rows: Fraction = field(default_factory=Fraction)
    emptied_rows: Fraction = field(default_factory=Fraction)
    layout: Layout = field(default_factory=Layout)
    kept: TokenDivergence = field(default_factory=TokenDivergence)

    def update(self, batch: Batch) -> Tensor | None:
        """Takes a chunk and answers which of its tokens all rules keep; None where there is no rule or no pair."""
        if not self.rules or not batch.has_pair:
            return None
        kept_N = torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.log_ratio_N.device)
        for rule in self.rules:
            kept_N &= rule.update(batch)
        self.layout.update(batch)
        self.rejected.update(~kept_N)
        kept_R = batch.row_counts(kept_N)
        self.rejected_rows.update(kept_R < batch.lengths_R)
        self.emptied_rows.update(kept_R == 0)
        self.kept.update(batch, None if bool(kept_N.all()) else kept_N)
        return kept_N

    def merge(self, other: Rejection) -> None:
        for mine, theirs in zip(self.rules, other.rules, strict=True):
            mine.merge(theirs)
        merge_fields(self, other)

    def verl(self, num_rows: int, num_tokens: int, mask_dtype: torch.dtype) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for rule in self.rules:
            metrics |= rule.verl(num_tokens, mask_dtype, self.layout)
        metrics["rollout_rs_masked_fraction"] = self.rejected.hits / guarded_count(num_tokens, mask_dtype)
        metrics["rollout_rs_seq_masked_fraction"] = row_fraction(self.rejected_rows.hits, num_rows)
        return metrics

    def audited(self, tokens: str) -> dict[str, Audited]:
        n, rows = self.rejected.total, self.rejected_rows.total
        result = {
            "rejected_token_fraction": Audited(self.rejected.value, n, tokens),
            "rejected_sequence_fraction": Audited(self.rejected_rows.value, rows, SEQUENCES),
            "fully_rejected_sequence_fraction": Audited(self.emptied_rows.value, rows, SEQUENCES),
        }
        for rule in self.rules:
            name = f"rejected_by_{rule.rule.option}"
            result[f"{name}_token_fraction"] = Audited(rule.rejected.value, n, tokens)
            result[f"{name}_sequence_fraction"] = Audited(rule.rejected_rows.value, rows, SEQUENCES)
        kept = self.kept.audited(KEPT_TOKENS)
        return result | {f"{AFTER}{key}": value for key, value in kept.items()}


def rejection_section(
    everything: Rejection, defended: Rejection, num_rows: int, num_tokens: int, mask_dtype: torch.dtype, tokens: str
) -> Section:
    """Both sides of the family; keys under verl's prefix."""
    verl = everything.verl(num_rows, num_tokens, mask_dtype)
    return Section({f"rollout_corr/{key}": value for key, value in verl.items()}, defended.audited(tokens))
