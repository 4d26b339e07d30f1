"""Rollout against train, token by token: differences of probability and log-prob, correlation, the worst tokens.

verl 0.9.1: calculate_debug_metrics (verl/utils/debug/metrics.py), which takes probabilities although its docstring
says log-probs. NeMo RL: token_mult_prob_error (nemo_rl/algorithms/loss/loss_functions.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_audit.batch import Batch
from rollout_audit.kernels.comparison import above, equal
from rollout_audit.kernels.sequence import seq_min, seq_sum
from rollout_audit.metrics.family import merge_fields
from rollout_audit.quantiles import Quantiles, SmallSample
from rollout_audit.report import SEQUENCES, Audited, Section
from rollout_audit.stats import CoMoments, Extremes, Fraction, Mean, Moments, Pending, TopK, Worst, largest

PREFIX = "training/"
_NO_TOKENS = "the mask has no valid token"


@dataclass
class DebugCompare:
    """Statistics of |difference| in probability and in log-prob space."""

    top: TopK
    probs: CoMoments = field(default_factory=CoMoments)
    log_probs: CoMoments = field(default_factory=CoMoments)
    prob_diff: Moments = field(default_factory=Moments)
    prob_diff_range: Extremes = field(default_factory=Extremes)
    log_ratio: Moments = field(default_factory=Moments)
    log_ratio_range: Extremes = field(default_factory=Extremes)
    abs_diff: Moments = field(default_factory=Moments)
    abs_quantiles: Quantiles = field(default_factory=Quantiles)
    far: Fraction = field(default_factory=Fraction)
    """|log ratio| > ln 2: one side gives the token more than twice the probability."""
    equal: Fraction = field(default_factory=Fraction)
    ratio: Moments = field(default_factory=Moments)
    mult_error: Mean = field(default_factory=Mean)
    row_mult_error: Moments = field(default_factory=Moments)
    row_mult_error_range: Extremes = field(default_factory=Extremes)
    row_mult_quantiles: Quantiles = field(default_factory=Quantiles)
    pairs: SmallSample = field(default_factory=SmallSample)
    ids: Fraction = field(default_factory=Fraction)
    """Token ids that differ between two files."""
    id_rows: Fraction = field(default_factory=Fraction)
    top_id_rows: TopK = field(default_factory=TopK)
    pending: Pending = field(default_factory=Pending)

    def update(self, batch: Batch) -> None:
        if not batch.num_tokens or not batch.has_pair:
            return
        self._update_ids(batch)
        for block in batch.blocks():
            self._update_tokens(block)
        if self.pending.add(batch.row_means(batch.mult_error_N)):
            self.settle()
        self._update_top(batch)

    def settle(self) -> None:
        """Take the rows that are pending."""
        if self.pending.count:
            (row_R,) = self.pending.take()
            self.row_mult_error.update(row_R)
            self.row_mult_error_range.update(row_R)
            self.row_mult_quantiles.update(row_R)

    def _update_tokens(self, batch: Batch) -> None:
        assert batch.old_N is not None
        assert batch.rollout_N is not None
        log_ratio_N = batch.log_ratio_N
        abs_N = log_ratio_N.abs()
        change, log_ratio = Moments(), batch.log_ratio_moments
        change.update(batch.prob_change_N)
        self.probs.update_shifted(batch.rollout_prob_N, batch.prob_change_N, change, lambda: batch.old_prob_N)
        self.prob_diff.update(batch.prob_diff_N, square=change.square)
        self.prob_diff_range.update(batch.prob_diff_N)
        old_N = batch.old_N
        self.log_probs.update_shifted(batch.rollout_N, log_ratio_N, log_ratio, lambda: old_N)
        self.log_ratio.merge(log_ratio)
        self.log_ratio_range.merge(batch.log_ratio_range)
        self.abs_diff.update(abs_N, square=log_ratio.square)
        self.abs_quantiles.update(abs_N)
        if batch.log_ratio_range.max_deviation(0.0) <= math.log(2):
            self.far.merge(Fraction(0, batch.num_tokens))
        else:
            self.far.update(above(abs_N, math.log(2)))
        self.equal.update(equal(log_ratio_N, 0.0))
        self.ratio.merge(batch.ratio_moments)
        self.mult_error.update(batch.mult_error_N)
        if self.pairs.count + batch.num_tokens <= self.pairs.limit:
            self.pairs.update(torch.stack([batch.old_N, batch.rollout_N], 1))
        else:
            self.pairs.skip(batch.num_tokens)

    def _update_top(self, batch: Batch) -> None:
        if not self.top.k or batch.log_ratio_range.max_deviation(0.0) < self.top.floor:
            return
        assert batch.old_N is not None
        assert batch.rollout_N is not None
        abs_N = batch.log_ratio_N.abs()
        index_K = largest(abs_N, self.top.k)
        items = []
        for index, row, column in zip(index_K.tolist(), *batch.places_of(index_K), strict=True):
            size = float(abs_N[index])
            if size < self.top.floor:
                continue
            pair = float(batch.rollout_N[index]), float(batch.old_N[index])
            values = (batch.token_id(index, row, column), *pair, float(batch.log_ratio_N[index]))
            items.append(Worst(-size, batch.path, row, column, values))
        self.top.add(items)

    def _update_ids(self, batch: Batch) -> None:
        if batch.token_ids_N is None or batch.other_token_ids_N is None:
            return
        differs_N = batch.token_ids_N != batch.other_token_ids_N
        self.ids.update(differs_N)
        counts_R = seq_sum(differs_N.double(), batch.rows)
        self.id_rows.update(counts_R > 0)
        columns_N = batch.columns_of_all().double()
        first_R = seq_min(torch.where(differs_N, columns_N, math.inf), batch.rows)
        rows_R = torch.nonzero(batch.filled).reshape(-1) + batch.first_row
        for row in largest(counts_R, self.top_id_rows.k).tolist():
            if counts_R[row]:
                place = Worst(-float(counts_R[row]), batch.path, int(rows_R[row]), int(first_R[row]))
                self.top_id_rows.add([place])

    def merge(self, other: DebugCompare) -> None:
        merge_fields(self, other)

    # Reading

    def verl(self) -> dict[str, float]:
        found = self.prob_diff.count > 0
        return {
            "rollout_probs_diff_valid": int(found),
            "rollout_probs_diff_max": self.prob_diff_range.max,
            "rollout_probs_diff_mean": self.prob_diff.mean,
            "rollout_probs_diff_std": self.prob_diff.std(ddof=1),
            "rollout_actor_probs_pearson_corr": self.probs.pearson,
        }

    def audited(self, tokens: str) -> dict[str, Audited]:
        n, rows = int(self.prob_diff.count), int(self.row_mult_error.count)
        values = {
            "log_ratio_mean": self.log_ratio.mean,
            "log_ratio_std": self.log_ratio.std(),
            "log_ratio_min": self.log_ratio_range.min,
            "log_ratio_max": self.log_ratio_range.max,
            "log_prob_diff_abs_mean": self.abs_diff.mean,
            "log_prob_diff_abs_max": self.log_ratio_range.max_deviation(0.0),
            "log_prob_diff_abs_std": self.abs_diff.std(),
            "log_prob_diff_abs_median": self.abs_quantiles.at(0.5),
            "log_prob_diff_abs_p90": self.abs_quantiles.at(0.9),
            "log_prob_diff_abs_p99": self.abs_quantiles.at(0.99),
            "log_prob_diff_abs_p999": self.abs_quantiles.at(0.999),
            "log_prob_diff_above_ln2_fraction": self.far.value,
            "log_prob_equal_fraction": self.equal.value,
            "log_prob_pearson": self.log_probs.pearson,
            "log_prob_spearman": self._spearman(),
            "prob_diff_abs_mean": self.prob_diff.mean,
            "prob_diff_abs_max": self.prob_diff_range.max,
            "prob_pearson": self.probs.pearson,
            "mean_ratio": self.ratio.mean,
            "token_mult_prob_error": self.mult_error.value,
        }
        why = {
            "log_prob_pearson": _CONSTANT,
            "prob_pearson": _CONSTANT,
            "log_prob_spearman": _CONSTANT if n <= self.pairs.limit else _TOO_MANY,
        }
        result = {key: Audited(value, n, tokens, why.get(key, _OVERFLOW)) for key, value in values.items()}
        for key, value in {
            "seq_mult_prob_error_mean": self.row_mult_error.mean,
            "seq_mult_prob_error_median": self.row_mult_quantiles.at(0.5),
            "seq_mult_prob_error_min": self.row_mult_error_range.min,
            "seq_mult_prob_error_max": self.row_mult_error_range.max,
        }.items():
            result[key] = Audited(value, rows, SEQUENCES, _OVERFLOW)
        return result

    def _spearman(self) -> float:
        """Pearson correlation of ranks, ties getting their mean rank."""
        pairs_N2 = self.pairs.values_NK
        if pairs_N2 is None:
            return math.nan
        ranks = CoMoments()
        ranks.update(mean_ranks(pairs_N2[:, 0]), mean_ranks(pairs_N2[:, 1]))
        return ranks.pearson

    def worst_tokens(self) -> list[dict[str, object]]:
        """The tokens with the largest |log ratio|."""
        names = ("token_id", "rollout_log_prob", "train_log_prob", "log_ratio")
        result = []
        for item in self.top.items:
            values = [None if math.isnan(value) else value for value in item.values]
            place = {"path": item.path, "row": item.row, "position": item.position}
            result.append(place | dict(zip(names, values, strict=True)))
        return result

    def token_id_differences(self) -> dict[str, object] | None:
        """How the token ids of two files differ; None for one file."""
        if not self.ids.total:
            return None
        rows = [
            {"path": item.path, "row": item.row, "differing": int(-item.key), "first_position": item.position}
            for item in self.top_id_rows.items
        ]
        return {
            "differing_tokens": self.ids.hits,
            "tokens": self.ids.total,
            "differing_sequences": self.id_rows.hits,
            "sequences": self.id_rows.total,
            "worst_sequences": rows,
        }


_TOO_MANY = "ranks need all tokens at once: computed up to 32,768 tokens only"
_CONSTANT = "needs two tokens and values that vary"
_OVERFLOW = "too large for float64: some |log ratio| is far above 0 (see log_prob_diff_abs_max)"


def mean_ranks(values_N: Tensor) -> Tensor:
    """Rank of each value from 1, equal values sharing the mean of their ranks."""
    _, group_N, counts_G = torch.unique(values_N, return_inverse=True, return_counts=True)
    ends_G = torch.cumsum(counts_G, 0).double()
    ranks_G: Tensor = ends_G - (counts_G - 1) / 2
    return ranks_G[group_N]


def debug_section(everything: DebugCompare, defended: DebugCompare, tokens: str, missing: str) -> Section:
    """Both sides of the family; keys under verl's prefix. `missing` says why there are none."""
    verl = {PREFIX + key: value for key, value in everything.verl().items()}
    count = everything.prob_diff.count
    why_null = {} if count > 1 else dict.fromkeys(verl, _NO_TOKENS if not count else "needs two valid tokens")
    if count > 1 and everything.prob_diff.total == everything.prob_diff.total:
        why_null[PREFIX + "rollout_actor_probs_pearson_corr"] = "one side's probabilities are all equal"
    return Section(verl, defended.audited(tokens), {} if missing else why_null, missing)
