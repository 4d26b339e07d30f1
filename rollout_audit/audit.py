"""The loop: files -> state -> report. Chunks go to worker threads, states are merged in the order of the chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rollout_audit.config import Settings
from rollout_audit.diagnosis.input_rules import input_findings
from rollout_audit.errors import AuditError
from rollout_audit.metrics.coverage import FileCounts
from rollout_audit.readers.dump import Dump
from rollout_audit.readers.pair import DumpPair
from rollout_audit.readers.paths import steps_of
from rollout_audit.report import Note, Report
from rollout_audit.state import AuditState

Source = Dump | DumpPair
_MOST_CHUNKS = 16
"""Chunks that a worker puts into one state before it is merged."""
Progress = Callable[[int], None]
"""Told how many bytes are done since the last time."""


def audit(
    command: str,
    sources: Sequence[Source],
    settings: Settings,
    *,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
) -> AuditState:
    """Read every source once, in chunks of whole rows, and merge what they say."""
    chunks = [(source, first, last) for source in sources for first, last in source.blocks()]
    threads = threads or os.cpu_count() or 1
    size = max(1, min(_MOST_CHUNKS, len(chunks) // (4 * threads)))
    groups = [chunks[i : i + size] for i in range(0, len(chunks), size)]

    def work(group: Sequence[tuple[Source, int, int]]) -> tuple[AuditState, int]:
        state, num_bytes = AuditState(command, settings), 0
        for source, first, last in group:
            state.update(source.batch(first, last, device))
            num_bytes += source.num_bytes * (last - first) // max(1, source.rows)
        return state, num_bytes

    total = AuditState(command, settings)
    for source in sources:
        total.inputs += describe(source)
        total.notes += notes_of(source)
    for state, num_bytes in _in_order(work, groups, threads):
        total.merge(state)
        if progress is not None:
            progress(num_bytes)
    return total


def _in_order(work: Callable[[Any], Any], groups: Sequence[Any], threads: int) -> Iterator[Any]:
    """Results in the order of the groups; one intra-op thread a worker: many small parallel regions stall."""
    torch.set_num_threads(1)
    threads = min(threads, len(groups))
    if threads <= 1:
        yield from map(work, groups)
        return
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(work, groups)


def describe(source: Source) -> list[dict[str, Any]]:
    """A source's files for the report; what was counted in them is added when it is built."""
    dumps = (source.rollout, source.train) if isinstance(source, DumpPair) else (source,)
    return [
        {
            "path": dump.path,
            "counted_as": source.path,
            "sequences": dump.rows,
            "padded_tokens": dump.rows * dump.width,
            "mask": dump.mask if dump.mask_from is None else f"{dump.mask_from.mask} of {dump.mask_from.path}",
            "fields": dump.describe(),
            "metadata": dump.file.metadata,
        }
        for dump in dumps
    ]


def notes_of(source: Source) -> list[str]:
    """What was decided when the source was opened."""
    dumps = (source.rollout, source.train) if isinstance(source, DumpPair) else (source,)
    return [f"{dump.path}: {text}" for dump in dumps for text in dump.notes]


def build_report(state: AuditState) -> Report:
    """Everything that a state has to say, as plain data."""
    coverage = state.coverage
    report = Report(state.command, settings=_settings(state))
    for item in state.inputs:
        counts = coverage.files.get(item["counted_as"], FileCounts())
        counted = {"empty_sequences": counts.empty_rows, "valid_tokens": counts.tokens}
        shown = {key: value for key, value in item.items() if key != "counted_as"}
        report.inputs.append({"path": shown.pop("path"), "sequences": shown.pop("sequences"), **counted, **shown})
    report.notes += [Note(text) for text in state.notes]
    if coverage.num_nonfinite:
        report.why_not_finite = f"{coverage.num_nonfinite:,} valid tokens are NaN or infinite"
        report.notes.append(
            Note(
                f"audited values leave out {coverage.num_nonfinite:,} tokens that are NaN or infinite; in fractions "
                "of `metrics` a NaN counts as neither high nor low, as in verl"
            )
        )
    steps = steps_of(dump["path"] for dump in report.inputs)
    if len(steps) > 1:
        report.notes.append(
            Note(
                f"{len(steps)} training steps ({steps[0]} to {steps[-1]}) were taken as one batch; give one step's "
                "folder for the numbers of a step"
            )
        )
    for section in state.sections():
        report.add(section)
    if coverage.num_not_binary:
        _withhold_weighted(report, coverage.num_not_binary)
    defended = state.defended
    debug = defended.debug
    report.findings += input_findings(coverage, defended.offpolicy, debug, defended.weights)
    if debug is not None:
        report.extra["worst_tokens"] = debug.worst_tokens()
        if (ids := debug.token_id_differences()) is not None:
            report.extra["token_id_differences"] = ids
    return report


def _settings(state: AuditState) -> dict[str, Any]:
    chosen = state.settings.as_dict() if state.command == "is-metrics" else {"top": state.settings.top}
    return chosen | state.options


def _withhold_weighted(report: Report, num_not_binary: int) -> None:
    """verl's metrics weight tokens by such a mask, which is not computed here; its debug metrics do not."""
    keys = [key for key in report.metrics if key.startswith("rollout_corr/")]
    for key in keys:
        report.metrics[key] = None
    if keys:
        reason = f"{num_not_binary:,} mask values are neither 0 nor 1, and verl would weight tokens by them"
        others = [
            Note(note.text, [key for key in note.about if key not in keys]) for note in report.notes if note.about
        ]
        plain = [note for note in report.notes if not note.about]
        report.notes = plain + [note for note in others if note.about] + [Note(reason, keys)]


def check_tokens(state: AuditState) -> None:
    """is-metrics of nothing is an error; raises AuditError when no token is valid."""
    coverage = state.coverage
    if not coverage.num_tokens:
        raise AuditError(
            "no valid token",
            path=", ".join(item["path"] for item in state.inputs) or None,
            wanted="at least one 1 in the mask",
            found=f"{coverage.num_rows:,} sequences, all masked out",
        )
