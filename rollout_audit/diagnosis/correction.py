"""Whether importance sampling can correct this batch: one sentence, from k-hat and effective sample size.

k-hat says whether more samples would help, the effective sample size how much these ones are worth (Vehtari et al.
2024, kernels/psis.py). A healthy batch gives no sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_audit.report import Number

FINE, COSTLY, UNRELIABLE, USELESS = "fine", "costly", "unreliable", "useless"
_ENOUGH = 0.3
"""Effective sample size, as a share, from which weights are fine: below, verl's docs warn."""
_TOO_LITTLE = 0.05
"""Below this share nothing is left of the batch, whatever k-hat."""
_NO_MEAN = 1.0
"""From this k-hat on the weights' law has no mean, so no number of samples is enough."""

_REMEDY = {
    FINE: "use token-level truncation (rollout_is token) or rejection by the geometric mean (rollout_rs seq_mean_k1)",
    COSTLY: "truncate token weights (rollout_is token), which trades spread for bias, and look for the cause",
    UNRELIABLE: "raw weights will not do: truncate or reject tokens (rollout_is token, rollout_rs token_k1), which "
    "leaves a bias, and look for the cause",
    USELESS: "no weights correct this batch: find out why the log-probs differ (debug-compare) before training on it",
}
"""What to do, by the grade of the token weights; sequence weights are not better than those."""


@dataclass(frozen=True)
class Weights:
    """Raw weights in three numbers and a count; NaN for a k-hat that is not known, infinite for one beyond float64."""

    khat: float
    limit: float
    ess: float
    count: int

    @classmethod
    def of(cls, audited: Mapping[str, Number], denominators: Mapping[str, Mapping[str, Any]], what: str) -> Weights:
        """Those of "tokens" or "sequences" in a report."""
        khat, limit, ess = (_or_nan(audited.get(f"{name}_{what}")) for name in ("khat", "khat_threshold", "ess"))
        return cls(khat, limit, ess, denominators.get(f"ess_{what}", {}).get("count", 0))

    @property
    def grade(self) -> str:
        """fine: k-hat within its limit and 30 % effective; costly: less effective; unreliable: k-hat beyond its limit;
        useless: k-hat 1 or more, or less than 5 % effective. Where k-hat is not known the share decides."""
        if self.khat >= _NO_MEAN or self.ess < _TOO_LITTLE:
            return USELESS
        if self.khat > self.limit:
            return UNRELIABLE
        return FINE if self.ess >= _ENOUGH else COSTLY

    def words(self, what: str) -> str:
        khat = (
            "k-hat not known"
            if math.isnan(self.khat)
            else f"k-hat {round(self.khat, 2) + 0.0:.2f}, limit {self.limit:.2f}"
        )
        percent = 100 * self.ess
        share = f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"
        return f"{what} weights {self.grade} ({khat}; ESS {share} of {self.count:,})"


def can_be_corrected(tokens: Weights, sequences: Weights) -> str:
    """One sentence on what each kind of weights is worth here and what to do; empty where both are fine or unknown."""
    if not tokens.ess >= 0 or not sequences.ess >= 0 or tokens.grade == FINE == sequences.grade:
        return ""
    return f"{tokens.words('token')}; {sequences.words('sequence')}: {_REMEDY[tokens.grade]}"


def _or_nan(value: Number) -> float:
    return math.nan if value is None else float(value)
