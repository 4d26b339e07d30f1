"""Importance weights as they are applied: truncated or IcePop, by token or by sequence, computed or dumped.

verl 0.9.1: compute_rollout_correction_weights and compute_is_metrics (verl/trainer/ppo/rollout_corr_helper.py),
with PR #6806: the high and low sequence fractions come from raw weights, the other rollout_is_seq_* from applied ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_audit.batch import Batch, extremes_of
from rollout_audit.config import Settings
from rollout_audit.kernels.comparison import above, below, count_true
from rollout_audit.kernels.denominator import guarded_count, row_fraction, token_fraction
from rollout_audit.kernels.importance import SAFETY_BOUND, apply_threshold, clamp_log_ratio
from rollout_audit.kernels.sequence import seq_max, seq_min
from rollout_audit.metrics.family import audited_khat, exp_or_inf, exp_range, merge_fields
from rollout_audit.metrics.roundoff import Layout, guarded_std
from rollout_audit.report import SEQUENCES, Audited, Section
from rollout_audit.stats import Extremes, Fraction, Moments, Pending
from rollout_audit.tails import Tail

_NO_RAW = (
    "the dump has applied weights only: what lies above or below a threshold is known from raw weights "
    "(raw_rollout_is_weights) or log-probs"
)


@dataclass
class Importance:
    """Statistics of raw and applied weights over tokens, and of their row means over rows with a valid token."""

    settings: Settings
    num_rows: int = 0
    num_tokens: int = 0
    num_without_raw: int = 0
    """Tokens whose raw weight is not known."""
    layout: Layout = field(default_factory=Layout)
    applied: Moments = field(default_factory=Moments)
    bounded: Moments = field(default_factory=Moments)
    """Applied weights within [0, upper]: the same, unless dumped weights exceed the threshold."""
    applied_range: Extremes = field(default_factory=Extremes)
    high: Fraction = field(default_factory=Fraction)
    low: Fraction = field(default_factory=Fraction)
    dumped_raw: Moments = field(default_factory=Moments)
    """Raw weights that were dumped, where there are no log-probs to compute them from."""
    dumped_raw_range: Extremes = field(default_factory=Extremes)
    dumped_raw_tail: Tail = field(default_factory=Tail)
    """Their logs."""
    outside: Fraction = field(default_factory=Fraction)
    """Tokens that truncation or IcePop changes."""
    outside_rows: Fraction = field(default_factory=Fraction)
    log_sum_range: Extremes = field(default_factory=Extremes)
    log_sum_high: Fraction = field(default_factory=Fraction)
    log_sum_low: Fraction = field(default_factory=Fraction)
    row_mean: Moments = field(default_factory=Moments)
    row_mean_range: Extremes = field(default_factory=Extremes)
    row_high: Fraction = field(default_factory=Fraction)
    row_low: Fraction = field(default_factory=Fraction)
    applied_row_high: Fraction = field(default_factory=Fraction)
    applied_row_low: Fraction = field(default_factory=Fraction)
    pending: Pending = field(default_factory=Pending)
    pending_raw: Pending = field(default_factory=Pending)

    @property
    def by_sequence(self) -> bool:
        return self.settings.rollout_is == "sequence"

    def update(self, batch: Batch) -> None:
        self.num_rows += batch.num_rows
        if self.settings.rollout_is is None or not (batch.has_pair or batch.weights_N is not None):
            return
        self.num_tokens += batch.num_tokens
        self.layout.update(batch)
        if self.by_sequence and batch.has_pair:
            self._update_sequence(batch)
        elif batch.has_pair:
            raw_N = batch.clamped_ratio_N
            inside = exp_or_inf(batch.log_ratio_range.max) <= self.settings.upper and self.settings.lower is None
            applied_N = raw_N if inside else apply_threshold(raw_N, self.settings.lower, self.settings.upper)
            self._update_tokens(batch, applied_N, raw_N)
        else:
            assert batch.weights_N is not None
            self._update_tokens(batch, batch.weights_N, batch.raw_weights_N)
            if batch.raw_weights_N is not None:
                self.dumped_raw.update(batch.raw_weights_N)
                self.dumped_raw_tail.update(batch.raw_weights_N.log())
                self.dumped_raw_range.merge(batch.range_of(batch.raw_weights_N))
            if self.by_sequence and batch.raw_weights_N is not None:
                self._update_log_sums(batch.row_means(batch.raw_weights_N).log())

    def _update_tokens(self, batch: Batch, applied_N: Tensor, raw_N: Tensor | None) -> None:
        upper = self.settings.upper
        if applied_N is raw_N and batch.within_bound:
            applied, extremes = batch.ratio_moments, exp_range(batch.log_ratio_range)
        else:
            applied, extremes = Moments(), extremes_of(applied_N)
            applied.update(applied_N)
        self.applied.merge(applied)
        self.applied_range.merge(extremes)
        if batch.has_pair or (extremes.low >= 0 and extremes.high <= upper):
            self.bounded.merge(applied)
        else:
            self.bounded.update(applied_N.clamp(0.0, upper))
        row_R = batch.row_means(applied_N)
        if raw_N is None:
            self.num_without_raw += batch.num_tokens
            self._add_rows(row_R, None)
            return
        self._add_rows(row_R, row_R if applied_N is raw_N else batch.row_means(raw_N))
        self._update_bounds(batch, raw_N)

    def _update_bounds(self, batch: Batch, raw_N: Tensor) -> None:
        """How many raw weights lie outside the bounds; where the extremes of a row do not, nothing is counted."""
        upper, lower = self.settings.upper, self.settings.lower_for_fraction
        n, rows = batch.num_tokens, batch.lengths_R.numel()
        extremes = exp_range(batch.log_ratio_range) if batch.has_pair else batch.range_of(raw_N)
        if lower < extremes.low and extremes.high < upper:
            for fraction, total in ((self.high, n), (self.low, n), (self.outside, n), (self.outside_rows, rows)):
                fraction.merge(Fraction(0, total))
            return
        # "not within" rather than "above": a NaN in a row must not hide the row's other tokens.
        above_R = ~(seq_max(raw_N, batch.rows) <= upper)
        below_R = ~(seq_min(raw_N, batch.rows) >= lower)
        high = count_true(above(raw_N, upper)) if bool(above_R.any()) else 0
        low = count_true(below(raw_N, lower)) if bool(below_R.any()) else 0
        self.high.merge(Fraction(high, n))
        self.low.merge(Fraction(low, n))
        icepop = self.settings.lower is not None
        self.outside.merge(Fraction(high + low if icepop else high, n))
        self.outside_rows.update(above_R | below_R if icepop else above_R)

    def _update_sequence(self, batch: Batch) -> None:
        log_sum_R = batch.log_ratio_sum_R
        raw_R = clamp_log_ratio(log_sum_R).exp()
        applied_R = apply_threshold(raw_R, self.settings.lower, self.settings.upper)
        copies_R = batch.lengths_R
        applied = Moments()
        applied.update(applied_R, copies_R)
        self.applied.merge(applied)
        self.bounded.merge(applied)
        self.applied_range.update(applied_R)
        share_R = copies_R / batch.divisor_R
        self._add_rows(applied_R * share_R, raw_R * share_R)
        self._update_log_sums(log_sum_R)
        high_R, low_R = raw_R > self.settings.upper, raw_R < self.settings.lower_for_fraction
        outside_R = high_R if self.settings.lower is None else high_R | low_R
        self.outside.update(outside_R, copies_R)
        self.outside_rows.update(outside_R)

    def _add_rows(self, applied_R: Tensor, raw_R: Tensor | None) -> None:
        full = self.pending.add(applied_R)
        if raw_R is not None:
            full |= self.pending_raw.add(raw_R)
        if full:
            self.settle()

    def settle(self) -> None:
        """Take the rows that are pending."""
        if self.pending.count:
            self._update_rows(*self.pending.take())
        if self.pending_raw.count:
            (raw_R,) = self.pending_raw.take()
            self.row_high.update(raw_R > self.settings.upper)
            self.row_low.update(raw_R < self.settings.lower_for_fraction)

    def _update_rows(self, applied_R: Tensor) -> None:
        upper, lower = self.settings.upper, self.settings.lower_for_fraction
        self.row_mean.update(applied_R)
        self.row_mean_range.update(applied_R)
        self.applied_row_high.update(applied_R > upper)
        self.applied_row_low.update(applied_R < lower)

    def _update_log_sums(self, log_sum_R: Tensor) -> None:
        low, high = self._log_thresholds()
        self.log_sum_range.update(log_sum_R)
        self.log_sum_high.update(log_sum_R > high)
        self.log_sum_low.update(log_sum_R < low)

    def replace_log_sums(self, log_sum_R: Tensor) -> None:
        """Take the log weight of each filled row from the caller, where raw weights were clamped."""
        self.log_sum_range, self.log_sum_high, self.log_sum_low = Extremes(), Fraction(), Fraction()
        self._update_log_sums(log_sum_R)

    def _log_thresholds(self) -> tuple[float, float]:
        """Logs of the bounds, in float32 as verl has them."""
        bounds = torch.tensor([self.settings.lower_for_fraction, self.settings.upper], dtype=torch.float32)
        low, high = bounds.log().tolist()
        return low, high

    def merge(self, other: Importance) -> None:
        merge_fields(self, other)

    # Reading

    def verl(self, num_rows: int, mask_dtype: torch.dtype) -> dict[str, float]:
        """verl's numbers: a row without a valid token has mean weight 0 and, by sequence, log weight 0."""
        self.settle()
        settings, n = self.settings, self.num_tokens
        divisor = guarded_count(n, mask_dtype)
        empty = num_rows - int(self.row_mean.count)
        mean = self.applied.total / divisor
        metrics: dict[str, float] = {}
        if self.by_sequence:
            low, high = self._log_thresholds()
            logs = Extremes.constant(0.0, empty)
            logs.merge(self.log_sum_range)
            known = not self.num_without_raw
            metrics |= {
                "rollout_is_max": math.exp(min(logs.max, SAFETY_BOUND)) if known else math.nan,
                "rollout_is_min": exp_or_inf(logs.min) if known else math.nan,
                "rollout_is_mean": mean,
                "rollout_is_ratio_fraction_high": self._of_rows(self.log_sum_high, empty * (high < 0), num_rows),
                "rollout_is_ratio_fraction_low": self._of_rows(self.log_sum_low, empty * (low > 0), num_rows),
            }
        else:
            metrics |= {
                "rollout_is_mean": mean,
                "rollout_is_ratio_fraction_high": self._of_tokens(self.high, mask_dtype),
                "rollout_is_ratio_fraction_low": self._of_tokens(self.low, mask_dtype),
                "rollout_is_max": self.applied_range.max,
                "rollout_is_min": self.applied_range.min,
            }
        metrics["rollout_is_std"] = self._std(divisor) if n > 1 else 0.0
        metrics["rollout_is_eff_sample_size"] = self._ess(divisor)
        rows, row_range = Moments.constant(0.0, empty), Extremes.constant(0.0, empty)
        rows.merge(self.row_mean)
        row_range.merge(self.row_mean_range)
        before = settings.verl_before_6806
        metrics |= {
            "rollout_is_seq_mean": rows.mean,
            "rollout_is_seq_std": rows.std(ddof=1) if num_rows > 1 else 0.0,
            "rollout_is_seq_max": row_range.max,
            "rollout_is_seq_min": row_range.min,
            "rollout_is_seq_max_deviation": row_range.max_deviation(1.0),
            "rollout_is_seq_fraction_high": row_fraction(self.applied_row_high.hits, num_rows)
            if before
            else self._of_rows(self.row_high, 0, num_rows),
            "rollout_is_seq_fraction_low": row_fraction(self.applied_row_low.hits + empty, num_rows)
            if before
            else self._of_rows(self.row_low, empty, num_rows),
        }
        if settings.lower is not None:
            metrics["rollout_is_oob_ratio"] = self._of_tokens(self.outside, mask_dtype)
        if settings.rollout_is_batch_normalize:
            factor = self.row_mean.mean if self.by_sequence else mean
            metrics["rollout_is_batch_norm_factor"] = factor if factor > 1e-8 else 1.0
        return metrics

    def _of_rows(self, fraction: Fraction, hits_of_empty: int, num_rows: int) -> float:
        return row_fraction(fraction.hits + hits_of_empty, num_rows) if not self.num_without_raw else math.nan

    def _of_tokens(self, fraction: Fraction, mask_dtype: torch.dtype) -> float:
        if self.num_without_raw:
            return math.nan
        return token_fraction(fraction.hits, self.num_tokens, mask_dtype)

    def _std(self, divisor: float) -> float:
        return guarded_std(self.bounded, divisor, self.layout, self.applied_range, (0.0, self.settings.upper))

    def _ess(self, divisor: float) -> float:
        """1 / E[(w / (E[w] + 1e-8))²]; verl divides by zero where all weights are 0."""
        mean_square = self.bounded.mean_square * (self.bounded.count / divisor)
        guarded_mean = self.bounded.total / divisor + 1e-8
        return guarded_mean * guarded_mean / mean_square if mean_square else math.nan

    def audited(self, tokens: str) -> dict[str, Audited]:
        """Over rows with a valid token, without guards; what truncation touches."""
        n, rows = self.num_tokens, int(self.row_mean.count)

        def over_tokens(value: float) -> Audited:
            return Audited(value, n, tokens)

        def over_rows(value: float) -> Audited:
            return Audited(value, rows, SEQUENCES)

        def known(fraction: Fraction, of: str) -> Audited:
            value = fraction.value if not self.num_without_raw else math.nan
            return Audited(value, n if of == tokens else rows, of, _NO_RAW)

        result = {
            "applied_weight_mean": over_tokens(self.applied.mean),
            "applied_weight_std": over_tokens(self.applied.std()),
            "ess_applied_tokens": over_tokens(_ess(self.applied)),
            "ess_applied_sequences": over_rows(_ess(self.row_mean)),
            "truncated_token_fraction": known(self.outside, tokens),
            "truncated_sequence_fraction": known(self.outside_rows, SEQUENCES),
            "rollout_is_seq_mean": over_rows(self.row_mean.mean),
            "rollout_is_seq_std": Audited(self.row_mean.std(ddof=1), rows, SEQUENCES, "needs two sequences"),
            "rollout_is_seq_max": over_rows(self.row_mean_range.max),
            "rollout_is_seq_min": over_rows(self.row_mean_range.min),
            "rollout_is_seq_max_deviation": over_rows(self.row_mean_range.max_deviation(1.0)),
            "rollout_is_seq_fraction_high": known(self.row_high, SEQUENCES),
            "rollout_is_seq_fraction_low": known(self.row_low, SEQUENCES),
        }
        if self.by_sequence:
            for name, log_weight in (("max", self.log_sum_range.max), ("min", self.log_sum_range.min)):
                value = exp_or_inf(log_weight) if not self.num_without_raw else math.nan
                why = _NO_RAW if self.num_without_raw else "too large for float64 (see seq_log_weight_max)"
                result[f"rollout_is_{name}"] = Audited(value, rows, SEQUENCES, why)
            result["rollout_is_ratio_fraction_high"] = known(self.log_sum_high, SEQUENCES)
            result["rollout_is_ratio_fraction_low"] = known(self.log_sum_low, SEQUENCES)
        return result

    def audited_raw(self, tokens: str) -> dict[str, Audited]:
        """What dumped raw weights say by themselves; empty where raw weights come from log-probs."""
        raw, extremes = self.dumped_raw, self.dumped_raw_range
        if not raw.count:
            return {}
        values = {
            "raw_weight_mean": raw.mean,
            "raw_weight_std": raw.std(),
            "raw_weight_min": extremes.min,
            "raw_weight_max": extremes.max,
            "ess_tokens": _ess(raw),
            "chi2_token": raw.mean_square - 1.0,
        }
        result = {key: Audited(value, int(raw.count), tokens) for key, value in values.items()}
        return result | audited_khat(self.dumped_raw_tail, tokens, "tokens")


def _ess(weights: Moments) -> float:
    return weights.mean * weights.mean / weights.mean_square if weights.mean_square else math.nan


def importance_section(
    everything: Importance, defended: Importance, num_rows: int, mask_dtype: torch.dtype, tokens: str, missing: str
) -> Section:
    """Both sides of the family; keys under verl's prefix. `missing` says why what is not there is not there."""
    if not everything.num_tokens:
        verl = {f"rollout_corr/{key}": math.nan for key in KEYS}
        return Section(verl, defended.audited(tokens), missing=missing)
    verl = {f"rollout_corr/{key}": value for key, value in everything.verl(num_rows, mask_dtype).items()}
    why_null = dict.fromkeys(verl, _NO_RAW) if everything.num_without_raw else {}
    if not everything.bounded.total:
        why_null["rollout_corr/rollout_is_eff_sample_size"] = (
            "every applied weight is 0 (verl 0.9.1 divides by zero here)"
        )
    return Section(verl, defended.audited(tokens), why_null)


KEYS = (
    "rollout_is_mean",
    "rollout_is_ratio_fraction_high",
    "rollout_is_ratio_fraction_low",
    "rollout_is_max",
    "rollout_is_min",
    "rollout_is_std",
    "rollout_is_eff_sample_size",
    "rollout_is_seq_mean",
    "rollout_is_seq_std",
    "rollout_is_seq_max",
    "rollout_is_seq_min",
    "rollout_is_seq_max_deviation",
    "rollout_is_seq_fraction_high",
    "rollout_is_seq_fraction_low",
)
"""verl's names, without the prefix, in its order; IcePop and batch normalisation add one each."""
