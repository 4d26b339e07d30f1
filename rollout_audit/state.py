"""AuditState: the metric families of a command, over any part of the data. Update, merge, read.

Chunks, files, ranks and steps are all states to merge; merging is associative and commutative, a fresh state is its
neutral element (tests/test_split.py), so any split of the rows gives the same report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollout_audit.batch import Batch
from rollout_audit.config import Settings
from rollout_audit.metrics.coverage import Coverage, WeightsCheck
from rollout_audit.metrics.debug import DebugCompare, debug_section
from rollout_audit.metrics.family import merge_fields
from rollout_audit.metrics.importance import Importance, importance_section
from rollout_audit.metrics.offpolicy import OffPolicy, offpolicy_section
from rollout_audit.metrics.rejection import Rejection, RuleStatistics, rejection_section
from rollout_audit.metrics.rows import RowSample
from rollout_audit.metrics.trend import Trend
from rollout_audit.report import FINITE_TOKENS, TOKENS, Section
from rollout_audit.stats import TopK


@dataclass
class Families:
    """One set of metric families over the same tokens; a command has those it needs."""

    offpolicy: OffPolicy | None = None
    importance: Importance | None = None
    rejection: Rejection | None = None
    debug: DebugCompare | None = None
    weights: WeightsCheck | None = None

    @classmethod
    def of_command(cls, command: str, settings: Settings) -> Families:
        if command == "debug-compare":
            return cls(debug=DebugCompare(TopK(settings.top)))
        if command == "diagnose":
            return cls(
                offpolicy=OffPolicy(),
                importance=Importance(settings),
                debug=DebugCompare(TopK(settings.top)),
                weights=WeightsCheck(settings),
            )
        return cls(
            offpolicy=OffPolicy(),
            importance=Importance(settings),
            rejection=Rejection([RuleStatistics(rule) for rule in settings.rules]),
            weights=WeightsCheck(settings),
        )

    def update(self, batch: Batch) -> None:
        for family in (self.offpolicy, self.importance, self.rejection, self.debug, self.weights):
            if family is not None:
                family.update(batch)

    def settle(self) -> None:
        """Take the rows that families have put aside."""
        for family in (self.offpolicy, self.importance, self.rejection, self.debug):
            if family is not None:
                family.settle()

    def merge(self, other: Families) -> None:
        merge_fields(self, other)


class AuditState:
    """Everything a report is read from.

    `everything` holds all valid tokens, as verl counts them; `defended` the finite ones, with plain denominators.
    For a clean chunk the two are the same numbers, so those of clean chunks are kept once, in `clean`; `as_is` and
    `cleaned` are there when some chunk was not.
    """

    def __init__(self, command: str, settings: Settings) -> None:
        self.command, self.settings = command, settings
        self.options: dict[str, Any] = {}
        """What else was chosen and belongs into the report's settings, such as the device."""
        self.inputs: list[dict[str, Any]] = []
        """The files, as the report describes them."""
        self.notes: list[str] = []
        self.left_out: list[str] = []
        """Messages of files that could not be read and were left out."""
        self.coverage = Coverage()
        self.sample: RowSample | None = RowSample() if command == "diagnose" else None
        self.trend: Trend | None = Trend() if command == "diagnose" else None
        self.clean = self._families()
        self.as_is: Families | None = None
        self.cleaned: Families | None = None

    def _families(self) -> Families:
        return Families.of_command(self.command, self.settings)

    def update(self, batch: Batch) -> None:
        """Take one chunk."""
        with np.errstate(all="ignore"):  # infinity minus infinity is NaN in numpy as in torch, which does not warn
            self.coverage.update(batch)
            if self.sample is not None and self.trend is not None:
                self.sample.update(batch)
                self.trend.update(batch.for_audit)
            if batch.for_audit is batch:
                self.clean.update(batch)
            else:
                self.as_is, self.cleaned = self.as_is or self._families(), self.cleaned or self._families()
                self.as_is.update(batch)
                self.cleaned.update(batch.for_audit)

    def settle(self) -> None:
        """Take the rows that families have put aside: before a state is kept or sent."""
        for families in (self.clean, self.as_is, self.cleaned):
            if families is not None:
                families.settle()

    def merge(self, other: AuditState) -> None:
        """Take what another state saw."""
        self.inputs = self.inputs + other.inputs
        self.left_out = self.left_out + other.left_out
        self.notes = self.notes + [note for note in other.notes if note not in self.notes]
        self.coverage.merge(other.coverage)
        if self.sample is not None and other.sample is not None:
            self.sample.merge(other.sample)
        if self.trend is not None and other.trend is not None:
            self.trend.merge(other.trend)
        self.clean.merge(other.clean)
        if other.as_is is not None and other.cleaned is not None:
            self.as_is, self.cleaned = self.as_is or self._families(), self.cleaned or self._families()
            self.as_is.merge(other.as_is)
            self.cleaned.merge(other.cleaned)

    @property
    def everything(self) -> Families:
        """Families over all valid tokens."""
        return self._with_clean(self.as_is)

    @property
    def defended(self) -> Families:
        """Families over what an auditor counts."""
        return self._with_clean(self.cleaned)

    def _with_clean(self, others: Families | None) -> Families:
        if others is None:
            self.clean.settle()
            return self.clean
        total = self._families()
        total.merge(self.clean)
        total.merge(others)
        return total

    @property
    def tokens(self) -> str:
        """What the audited values are taken over."""
        return FINITE_TOKENS if self.coverage.num_nonfinite else TOKENS

    def sections(self) -> list[Section]:
        """The numbers, family by family, in the order of the report."""
        coverage, tokens = self.coverage, self.tokens
        rows, n, dtype = coverage.num_rows, coverage.num_tokens, coverage.mask_dtype or torch.int64
        result = [Section(audited=coverage.audited())]
        all_, mine = self.everything, self.defended
        missing = self.missing()
        if all_.importance and mine.importance and self.settings.rollout_is is not None:
            no_weights = "" if all_.importance.num_tokens else missing
            result.append(importance_section(all_.importance, mine.importance, rows, dtype, tokens, no_weights))
        if all_.rejection and mine.rejection and self.settings.rules:
            result.append(rejection_section(all_.rejection, mine.rejection, rows, n, dtype, tokens))
        if all_.offpolicy and mine.offpolicy:
            section = offpolicy_section(all_.offpolicy, mine.offpolicy, rows, n, dtype, tokens, missing)
            section.audited |= mine.importance.audited_raw(tokens) if mine.importance else {}
            result.append(section)
        if all_.debug and mine.debug:
            result.append(debug_section(all_.debug, mine.debug, tokens, missing))
        return result

    def missing(self) -> str:
        """Which log-probs the dump lacks, as a reason; empty when it has both."""
        lacking = [name for name in ("rollout_log_probs", "old_log_probs") if not self.coverage.present.get(name)]
        return f"the dump has no {' and no '.join(lacking)}" if lacking else ""
