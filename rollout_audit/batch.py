"""Batch: one chunk of rows, packed once, under canonical names. Nobody after this file knows of masks or padding.

Legend of axes, used in tensor names everywhere: B sequences (rows) of the chunk, T padded positions (here and in
readers only), N valid tokens, row after row. Statistics are float64 on the chosen device; lengths stay on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rollout_audit.kernels.comparison import select
from rollout_audit.kernels.denominator import guarded_lengths
from rollout_audit.kernels.divergence import ESTIMATORS
from rollout_audit.kernels.importance import SAFETY_BOUND, clamp_log_ratio
from rollout_audit.kernels.rejection import OverRows
from rollout_audit.kernels.sequence import Segments, seq_sum
from rollout_audit.packing import count_not_binary, pack, row_lengths
from rollout_audit.stats import Extremes, Moments

_BLOCK_TOKENS = 196_608
_NEAR_ONE = 0.05
_WITHOUT_FLOAT64 = ("mps",)

_TOKEN_BY_TOKEN = {"ratio_N", "relative_change_N", "k3_N", "prob_diff_N"}
"""What a selection of tokens can take over, because it was computed token by token."""

VALUES = ("old_log_probs", "rollout_log_probs", "rollout_is_weights", "raw_rollout_is_weights")
"""Canonical fields that hold one number a token."""


@dataclass
class Batch:
    """Valid tokens of some rows. A field that the dump lacks is None."""

    lengths_B: Tensor
    old_N: Tensor | None = None
    rollout_N: Tensor | None = None
    weights_N: Tensor | None = None
    raw_weights_N: Tensor | None = None
    token_ids_N: Tensor | None = None
    other_token_ids_N: Tensor | None = None
    """Token ids of the file that the train side was read from, when that is another one."""
    read_row_ids: Callable[[int], Tensor] | None = None
    """Token ids [T] of a row of the file, where `token_ids_N` were not read."""
    columns_N: Tensor | None = None
    """Position of each token in its padded row; None where rows are right-padded without holes."""
    mask_dtype: torch.dtype = torch.int64
    weights_dtype: torch.dtype = torch.float64
    """Coarsest dtype among what the dumped weights and log-probs were stored in: bounds their round-off."""
    guarded: bool = True
    """Whether row means use verl's denominators (n + 1e-8) or n."""
    num_not_binary: int = 0
    """Mask values other than 0 and 1."""
    path: str = ""
    first_row: int = 0
    width: int = 0
    """Padded length of the rows, T."""

    @classmethod
    def from_padded(
        cls,
        fields: dict[str, Tensor],
        mask_BT: Tensor,
        *,
        device: str = "cpu",
        mask_dtype: torch.dtype | None = None,
        path: str = "",
        first_row: int = 0,
    ) -> Batch:
        """Select the valid tokens (mask not 0) of padded [B, T] tensors under canonical names.

        Padding may hold anything, NaN included. Where a device has no float64, chunks are float32.
        """
        lengths_B, valid_BT, prefix = row_lengths(mask_BT)
        dtype = torch.float32 if device.startswith(_WITHOUT_FLOAT64) else torch.float64

        def packed(name: str) -> Tensor | None:
            x_BT = fields.get(name)
            if x_BT is None:
                return None
            x_N = pack(x_BT, lengths_B, valid_BT, prefix)
            # Moved before it is widened: half the bytes go over the bus.
            return x_N.to(device).to(dtype) if x_N.is_floating_point() else x_N

        columns_N = None
        if not prefix:
            columns_N = torch.nonzero(valid_BT)[:, 1]
        stored = [fields[name].dtype for name in VALUES if name in fields]
        return cls(
            lengths_B,
            old_N=packed("old_log_probs"),
            rollout_N=packed("rollout_log_probs"),
            weights_N=packed("rollout_is_weights"),
            raw_weights_N=packed("raw_rollout_is_weights"),
            token_ids_N=packed("responses"),
            columns_N=columns_N,
            mask_dtype=mask_dtype or mask_BT.dtype,
            weights_dtype=max(stored, key=lambda d: torch.finfo(d).eps, default=torch.float64),
            num_not_binary=count_not_binary(mask_BT),
            path=path,
            first_row=first_row,
            width=mask_BT.shape[-1],
        )

    def __post_init__(self) -> None:
        self._ranges: dict[int, Extremes] = {}
        self._over_rows: dict[str, dict[str, Tensor]] = {}
        tokens = int(self.lengths_B.sum())
        assert all(values_N.numel() == tokens for values_N in self.values().values())
        assert self.token_ids_N is None or self.token_ids_N.numel() == tokens

    def values(self) -> dict[str, Tensor]:
        """The fields with one number a token that are there, by canonical name."""
        fields = (self.old_N, self.rollout_N, self.weights_N, self.raw_weights_N)
        return {name: x_N for name, x_N in zip(VALUES, fields, strict=True) if x_N is not None}

    @property
    def num_rows(self) -> int:
        return self.lengths_B.numel()

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths_B.sum())

    @cached_property
    def filled(self) -> Tensor:
        """Which rows have a valid token."""
        return self.lengths_B > 0

    @cached_property
    def lengths_R(self) -> Tensor:
        """Valid tokens of each filled row."""
        return self.lengths_B[self.filled]

    @cached_property
    def rows(self) -> Segments:
        """Where the filled rows lie."""
        return Segments(self.lengths_R)

    @cached_property
    def divisor_R(self) -> Tensor:
        """What a filled row's sum is divided by for its mean."""
        return guarded_lengths(self.lengths_R, self.mask_dtype) if self.guarded else self.lengths_R.double()

    def row_means(self, values_N: Tensor) -> Tensor:
        """Mean over each filled row."""
        return seq_sum(values_N, self.rows) / self.divisor_R

    def row_sums(self, values_N: Tensor) -> Tensor:
        """Sum over each filled row."""
        return seq_sum(values_N, self.rows)

    def row_counts(self, hit_N: Tensor) -> Tensor:
        """How many tokens of each filled row are hit."""
        return seq_sum(hit_N.to(torch.int64), self.rows)

    # What several metric families need, computed once a chunk.

    def range_of(self, values_N: Tensor) -> Extremes:
        """Extremes of one of the fields, kept."""
        if id(values_N) not in self._ranges:
            self._ranges[id(values_N)] = extremes_of(values_N)
        return self._ranges[id(values_N)]

    @property
    def has_pair(self) -> bool:
        return self.old_N is not None and self.rollout_N is not None

    @cached_property
    def log_ratio_N(self) -> Tensor:
        """train - rollout."""
        assert self.old_N is not None
        assert self.rollout_N is not None
        return self.old_N - self.rollout_N

    @property
    def huge(self) -> bool:
        """More tokens than an ordinary chunk, as of a row of a million: nothing that is easily made again is kept."""
        return self.num_tokens > 2 * _BLOCK_TOKENS

    def blocks(self, keep_N: Tensor | None = None) -> Iterator[Batch]:
        """The tokens (to keep) in pieces of bounded size, for what is taken over tokens only.

        A batch of an ordinary chunk is one piece, itself; other pieces know no rows.
        """
        if keep_N is None and not self.huge:
            yield self
            return
        step = _BLOCK_TOKENS if self.huge else max(1, self.num_tokens)
        for first in range(0, self.num_tokens, step):
            part = slice(first, first + step)
            kept_N = None if keep_N is None else keep_N[part]
            yield self._tokens(part, kept_N)

    def _tokens(self, part: slice, kept_N: Tensor | None) -> Batch:
        """Some of the tokens, with what was computed of them."""

        def chosen(x_N: Tensor) -> Tensor:
            return x_N[part] if kept_N is None else select(x_N[part], kept_N)

        values = {name: chosen(x_N) for name, x_N in self.values().items()}
        length = next(iter(values.values())).numel()
        some = Batch(
            torch.tensor([length]), old_N=values.get("old_log_probs"), rollout_N=values.get("rollout_log_probs")
        )
        if not self.huge and self.has_pair:
            some.log_ratio_N = chosen(self.log_ratio_N)
            if some.num_tokens and some._near_one == self._near_one:  # else its k3 would have our cancellation
                known = self.__dict__.keys() & _TOKEN_BY_TOKEN
                some.__dict__.update({name: chosen(self.__dict__[name]) for name in known})
        return some

    @property
    def mult_error_N(self) -> Tensor:
        """exp(|log ratio|)."""
        return self.log_ratio_N.abs().exp_() if self.huge else self._mult_error_N

    @cached_property
    def _mult_error_N(self) -> Tensor:
        return torch.maximum(self.ratio_N, self.ratio_N.reciprocal())  # one exp less

    @cached_property
    def log_ratio_range(self) -> Extremes:
        return extremes_of(self.log_ratio_N)

    @cached_property
    def within_bound(self) -> bool:
        """No log ratio beyond ±20, so that clamping changes nothing."""
        return self.log_ratio_range.max_deviation(0.0) <= SAFETY_BOUND if self.num_tokens else True

    @cached_property
    def clamped_log_ratio_N(self) -> Tensor:
        return self.log_ratio_N if self.within_bound else clamp_log_ratio(self.log_ratio_N)

    @cached_property
    def ratio_N(self) -> Tensor:
        """exp(log ratio), not clamped."""
        return self.relative_change_N + 1.0 if self._near_one else self.log_ratio_N.exp()

    @cached_property
    def clamped_ratio_N(self) -> Tensor:
        """verl's raw token weight, exp of the log ratio within ±20."""
        return self.ratio_N if self.within_bound else self.clamped_log_ratio_N.exp()

    @property
    def _near_one(self) -> bool:
        return self.log_ratio_range.max_deviation(0.0) < _NEAR_ONE

    @cached_property
    def relative_change_N(self) -> Tensor:
        """ratio - 1. Where ratios are all near 1 the subtraction would cancel; elsewhere its 1e-16 is nothing."""
        return self.log_ratio_N.expm1() if self._near_one else self.ratio_N - 1.0

    @cached_property
    def k3_N(self) -> Tensor:
        """r - 1 - log r (kernels/divergence.py), from what is there already."""
        return self.relative_change_N - self.log_ratio_N

    def clamped_divergence(self, estimator: str) -> Tensor:
        """k1, k2 or k3 of the log ratio within ±20, as verl's rejection rules take them."""
        if estimator == "k3" and self.within_bound and not self.huge:
            return self.k3_N
        return ESTIMATORS[estimator](self.clamped_log_ratio_N)

    def divergence_over_rows(self, estimator: str) -> OverRows:
        """The same over each filled row; several rules ask for one of them."""
        # Only what was reduced is kept: an OverRows that is kept here would hold the batch in a cycle.
        known = self._over_rows.setdefault(estimator, {})
        return OverRows(lambda: self.clamped_divergence(estimator), self.rows, self.divisor_R, known)

    @cached_property
    def log_ratio_sum_R(self) -> Tensor:
        """Sum of the log ratio over each filled row: the log of the sequence weight."""
        return seq_sum(self.log_ratio_N, self.rows)

    @cached_property
    def rollout_prob_N(self) -> Tensor:
        assert self.rollout_N is not None
        return self.rollout_N.exp()

    @cached_property
    def old_prob_N(self) -> Tensor:
        assert self.old_N is not None
        return self.rollout_prob_N * self.ratio_N if self.within_bound else self.old_N.exp()

    @cached_property
    def prob_change_N(self) -> Tensor:
        """train - rollout probability = rollout probability * (ratio - 1)."""
        return self._prob_change()

    def _prob_change(self) -> Tensor:
        if self.within_bound:
            return self.rollout_prob_N * self.relative_change_N
        return self.old_prob_N - self.rollout_prob_N

    @cached_property
    def prob_diff_N(self) -> Tensor:
        """|train - rollout probability|."""
        kept = "prob_change_N" in self.__dict__
        return self.prob_change_N.abs() if kept else self._prob_change().abs_()

    @cached_property
    def log_ratio_moments(self) -> Moments:
        moments = Moments()
        moments.update(self.log_ratio_N)
        return moments

    @cached_property
    def ratio_moments(self) -> Moments:
        moments = Moments()
        moments.update(self.relative_change_N)
        return moments.shifted(1.0)

    @cached_property
    def finite_N(self) -> Tensor | None:
        """Which tokens are finite in every field; None when all are (extremes tell that ten times faster)."""
        values = list(self.values().values())
        extremes = [self.range_of(x_N) for x_N in values]
        if not self.num_tokens or all(math.isfinite(e.low) and math.isfinite(e.high) for e in extremes):
            return None
        keep_N = torch.ones(self.num_tokens, dtype=torch.bool, device=values[0].device)
        for x_N in values:
            keep_N &= torch.isfinite(x_N)
        return None if bool(keep_N.all()) else keep_N

    @property
    def for_audit(self) -> Batch:
        """The same rows as an auditor takes them: finite tokens only, plain denominators. Often the batch itself."""
        # Not a cached property where it is the batch itself: the cycle would keep every chunk until Python looks.
        return self._as_audited or self

    @cached_property
    def _as_audited(self) -> Batch | None:
        # A float64 mask keeps verl's 1e-8 in row means, a half-precision one rounds lengths over 256 or 2,048.
        exact = not self.guarded or not self.mask_dtype.is_floating_point or self.mask_dtype == torch.float32
        if self.finite_N is None and exact:
            return None
        plain = replace(self, guarded=False)
        return plain if self.finite_N is None else plain.only(self.finite_N)

    def only(self, keep_N: Tensor) -> Batch:
        """The rows with only the tokens to keep; a row may become empty."""

        def kept(x_N: Tensor | None) -> Tensor | None:
            return None if x_N is None else select(x_N, keep_N)

        kept_B = torch.zeros_like(self.lengths_B)
        kept_B[self.filled] = self.row_counts(keep_N)
        return replace(
            self,
            lengths_B=kept_B,
            old_N=kept(self.old_N),
            rollout_N=kept(self.rollout_N),
            weights_N=kept(self.weights_N),
            raw_weights_N=kept(self.raw_weights_N),
            token_ids_N=kept(self.token_ids_N),
            other_token_ids_N=kept(self.other_token_ids_N),
            columns_N=kept(self.columns_of_all()),
        )

    def token_id(self, index: int, row: int, column: int) -> float:
        """Id of the token at `index`, which is that row and position; NaN where the dump has none."""
        if self.token_ids_N is not None:
            return int(self.token_ids_N[index])
        return math.nan if self.read_row_ids is None else int(self.read_row_ids(row)[column])

    def columns_of_all(self) -> Tensor:
        """Position of every token in its padded row."""
        if self.columns_N is not None:
            return self.columns_N
        starts_N = torch.repeat_interleave(torch.cumsum(self.lengths_B, 0) - self.lengths_B, self.lengths_B)
        return torch.arange(self.num_tokens) - starts_N

    def places_of(self, index_K: Tensor) -> tuple[list[int], list[int]]:
        """Row in the file and position in the padded row of each of these tokens."""
        ends_B = torch.cumsum(self.lengths_B, 0)
        row_K = torch.searchsorted(ends_B, index_K, right=True)
        column_K = self.columns_N[index_K] if self.columns_N is not None else index_K - (ends_B - self.lengths_B)[row_K]
        return (row_K + self.first_row).tolist(), column_K.tolist()


def extremes_of(values_N: Tensor) -> Extremes:
    """Smallest and largest value."""
    extremes = Extremes()
    extremes.update(values_N)
    return extremes
