"""The loop: files -> state -> report. Chunks go to worker threads, states are merged in the order of the chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rollout_audit.config import Settings
from rollout_audit.diagnosis.correction import Weights, can_be_corrected
from rollout_audit.diagnosis.file_rules import file_findings
from rollout_audit.diagnosis.input_rules import input_findings
from rollout_audit.errors import AuditError
from rollout_audit.heap import keep_freed_memory
from rollout_audit.metrics.coverage import FileCounts
from rollout_audit.metrics.rows import Bound
from rollout_audit.readers.dump import Dump
from rollout_audit.readers.layout import by_step, incomplete
from rollout_audit.readers.pair import DumpPair
from rollout_audit.report import Note, Report
from rollout_audit.state import AuditState

if TYPE_CHECKING:
    from rollout_audit.engine_ray import RayEngine

T = TypeVar("T")
Source = Dump | DumpPair
_MOST_CHUNKS = 16
"""Chunks that a worker puts into one state before it is merged."""
CHUNK_TOKENS = 196_608
"""Padded positions of a chunk: a dozen float64 vectors of it are 19 MB (chunks of 4 M are four times slower)."""
_LEAST_TOKENS = 65_536
"""A smaller chunk is mostly Python."""
_LIVE_TOKENS = 1_048_576
"""Padded positions that all threads may hold at once, to stay below 100 MB."""
_MOST_THREADS = 8
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
    keep_going: bool = False,
    engine: RayEngine | None = None,
) -> AuditState:
    """Read every source once, in chunks of whole rows, and merge what they say.

    The first source that cannot be read ends it with its AuditError; with `keep_going` it is left out whole, and named.
    The work is done by threads here, or by the tasks of an engine.
    """
    keep_freed_memory()
    if engine:
        threads, tokens = engine.slots, CHUNK_TOKENS
    else:
        threads, tokens = _share_out(sources, threads or min(os.cpu_count() or 1, _MOST_THREADS))
    if command == "diagnose":
        tokens = 2 * tokens // 3  # all families at once hold half as many vectors again, and the sample of rows
    broken: dict[int, AuditError] = {}
    chunks: list[tuple[int, Source, int, int]] = []
    for index, source in enumerate(sources):
        try:
            chunks += [(index, source, first, last) for first, last in source.blocks(tokens)]
        except AuditError as error:
            if not keep_going:
                raise
            broken[index] = error
    most = engine.most_chunks if engine else _MOST_CHUNKS
    groups = list(_group(chunks, threads, most))
    work = partial(_audit_group, command, settings, device, keep_going, Bound())

    # Results come in the order of the sources: with `keep_going` one at a time is kept apart, until all of it was read.
    total, part, current = AuditState(command, settings), AuditState(command, settings), 0
    for result in engine.map(work, groups) if engine else _in_order(work, groups, threads):
        for index, state, num_bytes in result:
            if index != current:
                if current not in broken:
                    total.merge(part)
                part, current = AuditState(command, settings), index
            if isinstance(state, AuditError):
                broken.setdefault(index, state)
            else:
                part.merge(state)
            if progress is not None:
                progress(num_bytes)
    if current not in broken:
        total.merge(part)
    return _described(total, sources, broken)


def _group(chunks: Sequence[T], workers: int, most: int) -> Iterator[Sequence[T]]:
    """Consecutive chunks for one worker at a time: large groups first, single chunks last, so that all end together."""
    first, share = 0, 2 * workers if workers > 1 else 1
    while first < len(chunks):
        size = max(1, min(most, (len(chunks) - first) // share))
        yield chunks[first : first + size]
        first += size


def _audit_group(
    command: str,
    settings: Settings,
    device: str,
    keep_going: bool,
    bound: Bound,
    group: Sequence[tuple[int, Source, int, int]],
) -> list[tuple[int, AuditState | AuditError, int]]:
    """Index, state and bytes read: of all chunks together, or with `keep_going` of each source, or why it is left out.

    A function of its own, so that it can run in another process.
    """
    state, num_bytes = AuditState(command, settings), 0
    result: list[tuple[int, AuditState | AuditError, int]] = []
    for index, chunks in groupby(group, key=itemgetter(0)):
        if keep_going:
            state, num_bytes = AuditState(command, settings), 0
        outcome: AuditState | AuditError = state
        try:
            with _own_stream(device):
                for _, source, first, last in chunks:
                    if state.sample is not None and not keep_going:  # else what is left out may keep others out
                        bound.share(state.sample)
                    state.update(source.batch(first, last, device))
                    num_bytes += source.num_bytes * (last - first) // max(1, source.rows)
            source.check_unchanged()
        except AuditError as error:
            if not keep_going:
                raise
            outcome = error
        state.settle()
        result.append((index, outcome, num_bytes))
    return result if keep_going else [(0, state, num_bytes)]


def _own_stream(device: str) -> AbstractContextManager[object]:
    """On cuda each worker has its own queue, so that one moves its chunk while another computes."""
    if not device.startswith("cuda"):
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _share_out(sources: Sequence[Source], threads: int) -> tuple[int, int]:
    """(threads, positions a chunk) within the memory: smaller chunks for many threads, fewer threads for huge rows."""
    tokens = min(CHUNK_TOKENS, max(_LEAST_TOKENS, _LIVE_TOKENS // threads))
    widest = max((source.width for source in sources), default=1)
    return max(1, min(threads, _LIVE_TOKENS // max(tokens, widest))), tokens


def _described(total: AuditState, sources: Sequence[Source], broken: dict[int, AuditError]) -> AuditState:
    """The state of all sources but the broken ones, with what it says about them."""
    for index, source in enumerate(sources):
        if index not in broken:
            total.inputs += describe(source)
            total.notes += notes_of(source)
    total.left_out = [str(error) for error in broken.values()]
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
    pair = isinstance(source, DumpPair)
    dumps = (source.rollout, source.train) if isinstance(source, DumpPair) else (source,)
    return [
        {
            "path": dump.path,
            **({"side": "rollout" if dump is dumps[0] else "train"} if pair else {}),
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


def build_report(state: AuditState, lacking: Sequence[str] | None = None) -> Report:
    """Everything that a state has to say, as plain data.

    `lacking` says what the step lacks where that shows only beside other steps; else it is told from the paths.
    """
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
    paths = [item["path"] for item in report.inputs]
    steps = [step for step in by_step(paths) if step is not None]
    if len(steps) > 1:
        report.notes.append(
            Note(
                f"{len(steps)} training steps ({steps[0]} to {steps[-1]}) were taken as one batch; --each step gives "
                "the numbers of each"
            )
        )
    for section in state.sections():
        report.add(section)
    tokens, sequences = (Weights.of(report.audited, report.denominators, what) for what in ("tokens", "sequences"))
    report.correction = can_be_corrected(tokens, sequences)
    if coverage.num_not_binary:
        _withhold_weighted(report, coverage.num_not_binary)
    defended = state.defended
    debug = defended.debug
    if defended.offpolicy is not None:
        report.notes += [Note(text) for text in defended.offpolicy.shortened_tails()]
    report.findings += file_findings(state.left_out, incomplete(paths) if lacking is None else lacking)
    report.findings += input_findings(coverage, defended.offpolicy, debug, defended.weights)
    if debug is not None:
        report.extra["worst_tokens"] = debug.worst_tokens()
        if (ids := debug.token_id_differences()) is not None:
            report.extra["token_id_differences"] = ids
    return report


def _settings(state: AuditState) -> dict[str, Any]:
    everything = state.settings.as_dict()
    chosen = {
        "is-metrics": everything,
        "diagnose": {"rollout_is_threshold": everything["rollout_is_threshold"]},
    }.get(state.command, {"top": state.settings.top})
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
