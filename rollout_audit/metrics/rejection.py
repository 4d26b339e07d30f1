"""Rejection sampling: each rule's statistic and what it rejects, all rules together, and what is left.

verl 0.9.1: compute_rollout_rejection_mask and compute_rs_metrics (verl/trainer/ppo/rollout_corr_helper.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_audit.batch import Batch, extremes_of
from rollout_audit.config import RejectionRule
from rollout_audit.kernels.comparison import above, below
from rollout_audit.kernels.denominator import guarded_count, row_fraction, token_fraction
from rollout_audit.kernels.rejection import LEVELS, keeps
from rollout_audit.kernels.sequence import to_tokens
from rollout_audit.metrics.family import merge_fields
from rollout_audit.metrics.offpolicy import TokenDivergence
from rollout_audit.metrics.roundoff import Layout, guarded_std
from rollout_audit.report import AFTER, KEPT_TOKENS, SEQUENCES, Audited, Section
from rollout_audit.stats import Extremes, Fraction, Moments, Pending


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
    pending: Pending = field(default_factory=Pending)

    def update(self, batch: Batch) -> Tensor | None:
        """Takes a chunk and answers which of its tokens the rule keeps; None for all."""
        if self.rule.level == "token":
            return self._update_tokens(batch)
        row_R = LEVELS[self.rule.level](batch.divergence_over_rows(self.rule.estimator))
        kept_R = keeps(row_R, self.rule.low, self.rule.high)
        self._add_rows(batch, row_R, ~kept_R)
        if bool(kept_R.all()):
            self.rejected.merge(Fraction(0, batch.num_tokens))
            return None
        rejected = int(batch.lengths_R[~kept_R].sum())
        self.rejected.merge(Fraction(rejected, batch.num_tokens))
        return to_tokens(kept_R, batch.rows).to(batch.log_ratio_N.device)

    def _update_tokens(self, batch: Batch) -> Tensor | None:
        low, high = self.rule.band
        row_R = batch.divergence_over_rows(self.rule.estimator).mean_R
        statistic_N = batch.clamped_divergence(self.rule.estimator)
        values, extremes = Moments(), extremes_of(statistic_N)
        values.update(statistic_N)
        self.tokens.merge(values)
        self.token_range.merge(extremes)
        if low <= extremes.low and extremes.high <= high:
            self.bounded.merge(values)
            for fraction in (self.token_high, self.token_low, self.rejected):
                fraction.merge(Fraction(0, batch.num_tokens))
            self._add_rows(batch, row_R, torch.zeros_like(row_R, dtype=torch.bool))
            return None
        self.bounded.update(statistic_N.clamp(low, high))
        self.token_high.update(above(statistic_N, high))
        self.token_low.update(below(statistic_N, low))
        rejected_N = ~keeps(statistic_N, self.rule.low, self.rule.high)
        self.rejected.update(rejected_N)
        self._add_rows(batch, row_R, batch.row_counts(rejected_N) > 0)
        return ~rejected_N

    def _add_rows(self, batch: Batch, row_R: Tensor, rejected_R: Tensor) -> None:
        self.rejected_rows.update(rejected_R)
        if self.pending.add(row_R, batch.lengths_R):
            self.settle()

    def settle(self) -> None:
        """Take the rows that are pending."""
        if not self.pending.count:
            return
        (low, high), (row_R, copies_R) = self.rule.band, self.pending.take()
        self.rows.update(row_R)
        self.row_range.update(row_R)
        self.row_high.update(row_R > high)
        self.row_low.update(row_R < low)
        if self.rule.level != "token":
            self.tokens.update(row_R, copies_R)
            self.bounded.update(row_R.clamp(low, high), copies_R)

    def merge(self, other: RuleStatistics) -> None:
        merge_fields(self, other)

    def verl(self, num_tokens: int, mask_dtype: torch.dtype, layout: Layout) -> dict[str, float]:
        self.settle()
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
        """Takes a chunk and answers which of its tokens all rules keep; None for all."""
        if not self.rules or not batch.has_pair:
            return None
        kept_N: Tensor | None = None
        for rule in self.rules:
            kept_by_rule_N = rule.update(batch)
            if kept_by_rule_N is not None:
                kept_N = kept_by_rule_N if kept_N is None else kept_N & kept_by_rule_N
        self.layout.update(batch)
        if kept_N is None:
            rows = batch.lengths_R.numel()
            self.rejected.merge(Fraction(0, batch.num_tokens))
            self.rejected_rows.merge(Fraction(0, rows))
            self.emptied_rows.merge(Fraction(0, rows))
        else:
            kept_R = batch.row_counts(kept_N)
            self.rejected.update(~kept_N)
            self.rejected_rows.update(kept_R < batch.lengths_R)
            self.emptied_rows.update(kept_R == 0)
        self.kept.update(batch, kept_N)
        return kept_N

    def settle(self) -> None:
        """Take the rows that rules have put aside."""
        for rule in self.rules:
            rule.settle()

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
