"""How far the two policies are apart: perplexities, KL, chi-squared, and the raw importance weights behind them.

verl 0.9.1: compute_offpolicy_metrics (verl/trainer/ppo/rollout_corr_helper.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_audit.batch import Batch
from rollout_audit.kernels import divergence
from rollout_audit.kernels.comparison import above, count_true
from rollout_audit.kernels.denominator import guarded_count
from rollout_audit.kernels.importance import SAFETY_BOUND, clamp_log_ratio, effective_sample_size
from rollout_audit.kernels.psis import tail_length
from rollout_audit.metrics.family import audited_khat, exp_or_inf, merge_fields
from rollout_audit.report import SEQUENCES, Audited, Section
from rollout_audit.stats import Extremes, LogSumExp, Mean, Moments, Pending
from rollout_audit.tails import Tail

_LOG_OF_LARGE = 300.0
"""exp(2 * 300) still fits into float64: below it sums of weights need no logs."""


@dataclass
class TokenDivergence:
    """Statistics of log ratios and raw weights over tokens."""

    count: int = 0
    log_ratio: Moments = field(default_factory=Moments)
    log_ratio_range: Extremes = field(default_factory=Extremes)
    log_ratio_abs: Mean = field(default_factory=Mean)
    k3: Mean = field(default_factory=Mean)
    inverse_k3: Mean = field(default_factory=Mean)
    weight: Moments = field(default_factory=Moments)
    clamped_weight: Moments = field(default_factory=Moments)
    weighted_log_ratio: Mean = field(default_factory=Mean)
    reverse_k3: Mean = field(default_factory=Mean)
    prob_diff: Mean = field(default_factory=Mean)
    prob_diff_range: Extremes = field(default_factory=Extremes)
    log_weight_sum: LogSumExp = field(default_factory=LogSumExp)
    log_weight_square_sum: LogSumExp = field(default_factory=LogSumExp)
    num_clamped: int = 0

    def update(self, batch: Batch, keep_N: Tensor | None = None) -> None:
        """Take the tokens of a chunk, or those to keep."""
        for block in batch.blocks(keep_N):
            self._update_block(block)

    def _update_block(self, batch: Batch) -> None:
        self.count += batch.num_tokens
        if not batch.num_tokens:
            return
        log_ratio_N, ratio_N = batch.log_ratio_N, batch.ratio_N
        log_ratio, weight = batch.log_ratio_moments, batch.ratio_moments
        moderate = batch.log_ratio_range.max < _LOG_OF_LARGE
        self.log_ratio.merge(log_ratio)
        self.log_ratio_range.merge(batch.log_ratio_range)
        self.log_ratio_abs.update(log_ratio_N.abs())
        k3 = Mean()
        k3.update(batch.k3_N)
        self.k3.merge(k3)
        # exp(-x) - 1 + x = x - (r - 1) / r: no further exponential, and no cancellation of ones.
        if moderate:
            self.inverse_k3.update(torch.addcdiv(log_ratio_N, batch.relative_change_N, ratio_N, value=-1))
        else:
            self.inverse_k3.update(divergence.k3(-log_ratio_N))
        self.weight.merge(weight)
        self.weighted_log_ratio.merge(Mean(batch.num_tokens, float(torch.dot(ratio_N, log_ratio_N))))
        # r log r - (r - 1) = (r - 1) log r - k3, of which no term is negative: nothing cancels.
        product = float(torch.dot(batch.relative_change_N, log_ratio_N))
        self.reverse_k3.merge(Mean(batch.num_tokens, product - k3.total))
        if batch.within_bound:
            self.clamped_weight.merge(weight)
        else:
            self.clamped_weight.update(batch.clamped_ratio_N)
            self.num_clamped += count_true(above(log_ratio_N.abs(), SAFETY_BOUND))
        if moderate and weight.total > 0:
            square_sum = weight.mean_square * weight.count
            self.log_weight_sum.merge(LogSumExp(math.log(weight.total)))
            self.log_weight_square_sum.merge(LogSumExp(math.log(square_sum) if square_sum else -math.inf))
        else:
            self.log_weight_sum.update(log_ratio_N)
            self.log_weight_square_sum.update(2.0 * log_ratio_N)
        difference_N = batch.prob_diff_N
        self.prob_diff.update(difference_N)
        self.prob_diff_range.update(difference_N)

    def merge(self, other: TokenDivergence) -> None:
        merge_fields(self, other)

    def ess(self) -> float:
        return effective_sample_size(self.log_weight_sum.value, self.log_weight_square_sum.value, self.count)

    def audited(self, tokens: str) -> dict[str, Audited]:
        """The values an auditor would defend; `tokens` says which tokens these are."""
        n = self.count
        second_moment = self.log_ratio.mean_square
        weighted = self.weighted_log_ratio.value
        values = {
            "log_ratio_mean": self.log_ratio.mean,
            "log_ratio_abs_mean": self.log_ratio_abs.value,
            "log_ratio_std": self.log_ratio.std(),
            "log_ratio_min": self.log_ratio_range.min,
            "log_ratio_max": self.log_ratio_range.max,
            "kl_rollout_train_k1": 0.0 - self.log_ratio.mean,
            "kl_rollout_train_k2": 0.5 * second_moment,
            "kl_rollout_train_k3": self.k3.value,
            "kl_train_rollout_k1": weighted,
            "kl_train_rollout_k3": self.reverse_k3.value,
            "inverse_k3": self.inverse_k3.value,
            "prob_diff_abs_mean": self.prob_diff.value,
            "prob_diff_abs_max": self.prob_diff_range.max,
            "raw_weight_mean": self.weight.mean,
            "raw_weight_std": self.weight.std(),
            "raw_weight_min": exp_or_inf(self.log_ratio_range.min),
            "raw_weight_max": exp_or_inf(self.log_ratio_range.max),
            "chi2_token": _chi2(self.ess(), self.log_weight_sum.value, n),
            "ess_tokens": self.ess(),
        }
        return {key: Audited(value, n, tokens, _OVERFLOW) for key, value in values.items()}


@dataclass
class OffPolicy:
    """Statistics of log ratios over tokens, and of row means and row sums over rows with a valid token."""

    num_rows: int = 0
    num_tokens: int = 0
    # rows
    train_log_ppl: Moments = field(default_factory=Moments)
    train_ppl: Moments = field(default_factory=Moments)
    rollout_log_ppl: Moments = field(default_factory=Moments)
    rollout_ppl: Moments = field(default_factory=Moments)
    log_ppl_diff: Moments = field(default_factory=Moments)
    log_ppl_abs_diff: Moments = field(default_factory=Moments)
    log_ppl_diff_range: Extremes = field(default_factory=Extremes)
    ppl_ratio: Moments = field(default_factory=Moments)
    seq_weight_square: Moments = field(default_factory=Moments)
    log_seq_weight: Moments = field(default_factory=Moments)
    log_seq_weight_range: Extremes = field(default_factory=Extremes)
    log_seq_weight_sum: LogSumExp = field(default_factory=LogSumExp)
    log_seq_weight_square_sum: LogSumExp = field(default_factory=LogSumExp)
    log_seq_weight_tail: Tail = field(default_factory=Tail)
    num_clamped_rows: int = 0
    log_weight_tail: Tail = field(default_factory=Tail)
    """Of tokens: the largest log ratios."""
    tokens: TokenDivergence = field(default_factory=TokenDivergence)
    pending: Pending = field(default_factory=Pending)
    pending_train: Pending = field(default_factory=Pending)

    def update(self, batch: Batch) -> None:
        self.num_rows += batch.num_rows
        if batch.old_N is None:
            return
        self.num_tokens += batch.num_tokens
        train_R = -batch.row_means(batch.old_N)
        if batch.rollout_N is None:
            full = self.pending_train.add(train_R)
        else:
            full = self.pending.add(train_R, -batch.row_means(batch.rollout_N), batch.log_ratio_sum_R)
            self.tokens.update(batch)
            self.log_weight_tail.update(batch.log_ratio_N, batch.log_ratio_range.max)
        if full:
            self.settle()

    def settle(self) -> None:
        """Take the rows that are pending."""
        if self.pending_train.count:
            self._update_train(*self.pending_train.take())
        if self.pending.count:
            self._update_rows(*self.pending.take())

    def _update_train(self, train_R: Tensor) -> None:
        self.train_log_ppl.update(train_R)
        self.train_ppl.update(train_R.exp())

    def _update_rows(self, train_R: Tensor, rollout_R: Tensor, log_weight_R: Tensor) -> None:
        self._update_train(train_R)
        self.rollout_log_ppl.update(rollout_R)
        self.rollout_ppl.update(rollout_R.exp())
        diff_R = train_R - rollout_R
        self.log_ppl_diff.update(diff_R)
        self.log_ppl_abs_diff.update(diff_R.abs())
        self.log_ppl_diff_range.update(diff_R)
        self.ppl_ratio.update(diff_R.exp())
        self.seq_weight_square.update((2.0 * clamp_log_ratio(log_weight_R)).exp())
        self.log_seq_weight.update(log_weight_R)
        self.log_seq_weight_range.update(log_weight_R)
        self.log_seq_weight_sum.update(log_weight_R)
        self.log_seq_weight_square_sum.update(2.0 * log_weight_R)
        self.log_seq_weight_tail.update(log_weight_R)
        self.num_clamped_rows += count_true(above(log_weight_R.abs(), SAFETY_BOUND))

    def merge(self, other: OffPolicy) -> None:
        merge_fields(self, other)

    # Reading

    def verl(self, num_rows: int, num_tokens: int, mask_dtype: torch.dtype) -> dict[str, float]:
        """verl's numbers: rows without a valid token count, with log-perplexity 0, perplexity 1 and weight 1."""
        self.settle()
        empty = num_rows - int(self.train_log_ppl.count)

        def over_rows(moments: Moments, of_empty: float) -> float:
            total = Moments.constant(of_empty, empty)
            total.merge(moments)
            return total.mean

        metrics = {
            "training_ppl": over_rows(self.train_ppl, 1.0),
            "training_log_ppl": over_rows(self.train_log_ppl, 0.0),
        }
        if not self.rollout_log_ppl.count:
            return metrics
        divisor, weight = guarded_count(num_tokens, mask_dtype), self.tokens.clamped_weight
        diff_range = Extremes.constant(0.0, empty)
        diff_range.merge(self.log_ppl_diff_range)
        metrics |= {
            "kl": (0.0 - self.tokens.log_ratio.total) / divisor,
            "k3_kl": self.tokens.k3.total / divisor,
            "rollout_ppl": over_rows(self.rollout_ppl, 1.0),
            "rollout_log_ppl": over_rows(self.rollout_log_ppl, 0.0),
            "log_ppl_diff": over_rows(self.log_ppl_diff, 0.0),
            "log_ppl_abs_diff": over_rows(self.log_ppl_abs_diff, 0.0),
            "log_ppl_diff_max": diff_range.max,
            "log_ppl_diff_min": diff_range.min,
            "ppl_ratio": over_rows(self.ppl_ratio, 1.0),
            "chi2_token": weight.mean_square * (weight.count / divisor) - 1.0,
            "chi2_seq": over_rows(self.seq_weight_square, 1.0) - 1.0,
        }
        return metrics

    def audited(self, tokens: str) -> dict[str, Audited]:
        """The values an auditor would defend; `tokens` says which tokens these are."""
        n, rows = self.tokens.count, int(self.rollout_log_ppl.count)
        train_rows = int(self.train_log_ppl.count)

        def over_rows(value: float) -> Audited:
            return Audited(value, rows, SEQUENCES)

        ess = effective_sample_size(self.log_seq_weight_sum.value, self.log_seq_weight_square_sum.value, rows)
        return {
            "training_ppl": Audited(self.train_ppl.mean, train_rows, SEQUENCES),
            "training_log_ppl": Audited(self.train_log_ppl.mean, train_rows, SEQUENCES),
            "rollout_ppl": over_rows(self.rollout_ppl.mean),
            "rollout_log_ppl": over_rows(self.rollout_log_ppl.mean),
            "log_ppl_diff": over_rows(self.log_ppl_diff.mean),
            "log_ppl_abs_diff": over_rows(self.log_ppl_abs_diff.mean),
            "log_ppl_diff_max": over_rows(self.log_ppl_diff_range.max),
            "log_ppl_diff_min": over_rows(self.log_ppl_diff_range.min),
            "ppl_ratio": over_rows(self.ppl_ratio.mean),
            **self.tokens.audited(tokens),
            "seq_log_weight_mean": over_rows(self.log_seq_weight.mean),
            "seq_log_weight_std": over_rows(self.log_seq_weight.std()),
            "seq_log_weight_min": over_rows(self.log_seq_weight_range.min),
            "seq_log_weight_max": over_rows(self.log_seq_weight_range.max),
            "chi2_seq": Audited(_chi2(ess, self.log_seq_weight_sum.value, rows), rows, SEQUENCES, _OVERFLOW),
            "ess_sequences": over_rows(ess),
            **audited_khat(self.log_weight_tail, tokens, "tokens"),
            **audited_khat(self.log_seq_weight_tail, SEQUENCES, "sequences"),
            "clamped_tokens": Audited(self.tokens.num_clamped if n else math.nan, n, tokens),
            "clamped_sequences": Audited(self.num_clamped_rows if n else math.nan, rows, SEQUENCES),
        }

    def shortened_tails(self) -> Iterator[str]:
        """What k-hat was fitted to where PSIS would take more than is kept."""
        for name, tail in (("tokens", self.log_weight_tail), ("sequences", self.log_seq_weight_tail)):
            if tail_length(tail.count) >= tail.limit:
                yield (
                    f"khat_{name} is fitted to the {tail.limit - 1:,} largest of {tail.count:,} weights; PSIS would "
                    f"take {tail_length(tail.count):,}"
                )


_OVERFLOW = "too large for float64: some log ratio is far above 0 (see log_ratio_max and seq_log_weight_max)"


def _chi2(ess: float, log_sum: float, count: int) -> float:
    """E[w²] - 1 = (E[w])² / ESS - 1, in logs."""
    return exp_or_inf(2 * (log_sum - math.log(count)) - math.log(ess)) - 1.0 if count and ess > 0 else math.nan


KEYS = (
    "training_ppl",
    "training_log_ppl",
    "kl",
    "k3_kl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "ppl_ratio",
    "chi2_token",
    "chi2_seq",
)
"""verl's names, without the prefix, in its order."""


def offpolicy_section(
    everything: OffPolicy,
    defended: OffPolicy,
    num_rows: int,
    num_tokens: int,
    mask_dtype: torch.dtype,
    tokens: str,
    missing: str,
) -> Section:
    """Both sides of the family; keys under verl's prefix. `missing` says why what is not there is not there."""
    known = everything.verl(num_rows, num_tokens, mask_dtype) if everything.num_tokens else {}
    verl = {f"rollout_corr/{key}": known.get(key, math.nan) for key in KEYS}
    return Section(verl, defended.audited(tokens), missing=missing)
