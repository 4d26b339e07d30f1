"""Any chunks, any files, any order of merging: the same report, to 1e-12."""

from __future__ import annotations

import gc
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from rollout_audit import audit as auditing
from rollout_audit import batch as batches
from rollout_audit.audit import audit, build_report
from rollout_audit.batch import Batch
from rollout_audit.config import SUPPORTED_ROLLOUT_RS_OPTIONS, Settings
from rollout_audit.readers.dump import open_dumps
from rollout_audit.readers.pair import open_pairs
from rollout_audit.report import Report
from rollout_audit.state import AuditState

NAN, INF = math.nan, math.inf
RULES = "token_k1,seq_sum_k1,seq_max_k3,seq_mean_k2"
BANDS = "0.5_1.8,0.3_3.0,0.2,0.02"
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "token": ("is-metrics", {}),
    "sequence": ("is-metrics", {"rollout_is": "sequence", "rollout_is_batch_normalize": True}),
    "icepop": ("is-metrics", {"rollout_is_threshold": "0.7_1.4", "rollout_is_batch_normalize": True}),
    "token-rs": ("is-metrics", {"rollout_rs": RULES, "rollout_rs_threshold": BANDS}),
    "sequence-rs": (
        "is-metrics",
        {"rollout_is": "sequence", "rollout_rs": RULES, "rollout_rs_threshold": BANDS, "verl_before_6806": True},
    ),
    "debug-compare": ("debug-compare", {"top": 6}),
}
WIDTH = 7


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As `audit` has it: a parallel region for a dozen numbers takes milliseconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Rows


@dataclass(frozen=True)
class Rows:
    """Padded rows; any slice of them is a chunk."""

    fields: dict[str, Tensor]
    mask: Tensor
    other_ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mask)

    def cut(self, first: int, last: int) -> Rows:
        part = slice(first, last)
        other = None if self.other_ids is None else self.other_ids[part]
        return Rows({name: x[part] for name, x in self.fields.items()}, self.mask[part], other)

    def batch(self, first: int, last: int, path: str = "dump", start_of_file: int = 0) -> Batch:
        part = self.cut(first, last)
        result = Batch.from_padded(part.fields, part.mask, path=path, first_row=first - start_of_file)
        return result if part.other_ids is None else replace(result, other_token_ids_N=part.other_ids[part.mask != 0])


NOISES = (0.0, 1e-6, 0.02, 0.3, 2.0, 30.0)


def make_rows(seed: int, number: int, noise: float, spoiled: bool, tied: bool) -> Rows:
    """Ragged rows, some empty, some with holes; `tied` rounds the log ratios, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -2.5 * torch.rand(number, WIDTH, generator=generator, dtype=torch.float64) - 0.01
    ratio = noise * torch.randn(number, WIDTH, generator=generator, dtype=torch.float64)
    if tied and noise:
        ratio = (ratio / noise).round() * noise
    if noise < 1:
        # Multiples of 2**-44: train - rollout gives the ratio back to the bit, so ties are ties and d has no round-off.
        rollout, ratio = (torch.round(x * 2.0**44) * 2.0**-44 for x in (rollout, ratio))
    train = rollout + ratio
    lengths = torch.randint(0, WIDTH + 1, (number, 1), generator=generator)
    mask = (torch.arange(WIDTH) < lengths).long()
    mask[torch.rand(number, WIDTH, generator=generator) < 0.1] = 0
    if spoiled:
        train[torch.rand(number, WIDTH, generator=generator) < 0.1] = NAN
        rollout[torch.rand(number, WIDTH, generator=generator) < 0.05] = -INF
    ids = torch.randint(0, 4, (number, WIDTH), generator=generator)
    other_ids = torch.where(torch.rand(number, WIDTH, generator=generator) < 0.3, ids + 1, ids)
    return Rows({"old_log_probs": train, "rollout_log_probs": rollout, "responses": ids}, mask, other_ids)


rows_of_any_kind = st.builds(
    make_rows,
    seed=st.integers(0, 10_000),
    number=st.integers(1, 12),
    noise=st.sampled_from(NOISES),
    spoiled=st.booleans(),
    tied=st.booleans(),
)


# Comparing


def close(got: Any, want: Any, absolute: float = 1e-12) -> bool:
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(close(got[key], want[key]) for key in want)
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(map(close, got, want))
    if isinstance(want, float) and isinstance(got, (int, float)):
        return math.isclose(got, want, rel_tol=1e-12, abs_tol=absolute)
    return bool(got == want)


def absolute(key: str, numbers: dict[str, Any]) -> float:
    """What a number may differ by beside 1e-12 of itself: the round-off of what cancels in it."""
    ends = [numbers.get(key.removesuffix("std") + end) for end in ("max", "min")]
    if key.endswith("std"):
        return 1e-12 * float(max(abs(x) for x in (*ends, 1e-3) if x is not None))  # of equal values, e.g. all exp(20)
    ratios = [numbers[name] for name in ("log_ratio_min", "log_ratio_max") if numbers.get(name) is not None]
    if any(abs(x) > 2 for x in ratios):
        return 1e-12
    return 1e-15 if "k3" in key else 1e-14


def parts_of(report: Report) -> dict[str, Any]:
    """What must not depend on the split, by name."""
    return {
        "metrics": report.metrics,
        "audited": report.audited,
        "denominators": report.denominators,
        "findings": [(one.code, one.summary, one.evidence, one.where) for one in report.findings],
        "notes": [(note.text, note.about) for note in report.notes],
        **report.extra,
    }


def assert_same(got: Report, want: Report) -> None:
    mine, theirs = parts_of(got), parts_of(want)
    assert mine.keys() == theirs.keys()
    for name, wanted in theirs.items():
        if isinstance(wanted, dict):
            assert mine[name].keys() == wanted.keys()
            numbers = want.metrics | want.audited if name in ("metrics", "audited") else {}
            wrong = {
                key: (mine[name][key], x)
                for key, x in wanted.items()
                if not close(mine[name][key], x, absolute(key, numbers))
            }
            assert not wrong, name
        else:
            assert close(mine[name], wanted), (name, mine[name], wanted)


def as_one_file(report: Report, files: dict[str, int]) -> Report:
    """The report with every place named as if all rows were one file; `files` says where each begins."""

    def place(where: dict[str, Any]) -> dict[str, Any]:
        if "row" in where:
            return where | {"path": "dump", "row": where["row"] + files[where["path"]]}
        if "path" in where:
            return where | {"path": "dump"}
        return where

    def places(list_of: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        summed: dict[str, int] = defaultdict(int)
        for where in list_of:
            if "empty_sequences" in where:
                summed["dump"] += where["empty_sequences"]
        if summed:
            return [{"path": path, "empty_sequences": count} for path, count in summed.items()]
        return [place(where) for where in list_of]

    extra = dict(report.extra)
    if "worst_tokens" in extra:
        extra["worst_tokens"] = places(extra["worst_tokens"])
    if "token_id_differences" in extra:
        ids = extra["token_id_differences"]
        extra["token_id_differences"] = ids | {"worst_sequences": places(ids["worst_sequences"])}
    findings = [replace(one, where=places(one.where)) for one in report.findings]
    return replace(report, findings=findings, extra=extra)


def whole(rows: Rows, command: str, chosen: Settings) -> Report:
    state = AuditState(command, chosen)
    state.update(rows.batch(0, len(rows)))
    return build_report(state)


def pieces(data: st.DataObject, number: int, what: str) -> list[tuple[int, int]]:
    """Consecutive ranges of rows, some of them maybe empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, number), max_size=6), label=f"{what} begin at"))
    return list(zip([0, *cuts], [*cuts, number], strict=True))


def merged(data: st.DataObject, states: list[AuditState]) -> AuditState:
    """All states in one, two drawn ones merged at a time."""
    while len(states) > 1:
        mine = states.pop(data.draw(st.integers(0, len(states) - 1)))
        other = states.pop(data.draw(st.integers(0, len(states) - 1)))
        mine.merge(other)
        states.append(mine)
    return states[0]


# The property


@pytest.mark.parametrize(("command", "options"), COMMANDS.values(), ids=COMMANDS)
@settings(max_examples=40, deadline=None)
@given(rows=rows_of_any_kind, data=st.data())
def test_any_chunks_of_a_file_merged_in_any_order_give_the_same_report(
    command: str, options: dict[str, Any], rows: Rows, data: st.DataObject
) -> None:
    chosen = Settings(**options)
    states = [AuditState(command, chosen)]
    for first, last in pieces(data, len(rows), "chunks"):
        if not data.draw(st.booleans(), label="the same state goes on"):
            states.append(AuditState(command, chosen))
        states[-1].update(rows.batch(first, last))
    assert_same(build_report(merged(data, states)), whole(rows, command, chosen))


@pytest.mark.parametrize(("command", "options"), COMMANDS.values(), ids=COMMANDS)
@settings(max_examples=25, deadline=None)
@given(rows=rows_of_any_kind, data=st.data())
def test_any_files_cut_into_any_chunks_give_the_report_of_one_file(
    command: str, options: dict[str, Any], rows: Rows, data: st.DataObject
) -> None:
    chosen = Settings(**options)
    states, files = [], {}
    for index, (begin, end) in enumerate(pieces(data, len(rows), "files")):
        files[f"file_{index}"] = begin
        for first, last in pieces(data, end - begin, "chunks"):
            states.append(AuditState(command, chosen))
            states[-1].update(rows.batch(begin + first, begin + last, f"file_{index}", begin))
    report = as_one_file(build_report(merged(data, states)), files)
    assert_same(report, whole(rows, command, chosen))


@pytest.mark.parametrize(("command", "options"), COMMANDS.values(), ids=COMMANDS)
@settings(max_examples=15, deadline=None)
@given(rows=rows_of_any_kind, size=st.integers(1, 9))
def test_rows_too_long_for_one_piece_give_the_same_report(
    command: str, options: dict[str, Any], rows: Rows, size: int
) -> None:
    chosen = Settings(**options)
    want = whole(rows, command, chosen)
    with patch.object(batches, "_BLOCK_TOKENS", size):
        assert_same(whole(rows, command, chosen), want)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100), data=st.data())
def test_more_tokens_than_a_small_sample_keeps_give_the_same_report_for_any_split(
    seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(9, 4096, generator=generator, dtype=torch.float64)
    train = rollout + 0.1 * torch.randn(9, 4096, generator=generator, dtype=torch.float64)
    rows = Rows({"old_log_probs": train, "rollout_log_probs": rollout}, torch.ones(9, 4096, dtype=torch.int64))
    for command in ("is-metrics", "debug-compare"):
        chosen = Settings()
        states = []
        for first, last in pieces(data, 9, "chunks"):
            states.append(AuditState(command, chosen))
            states[-1].update(rows.batch(first, last))
        assert_same(build_report(merged(data, states)), whole(rows, command, chosen))


# Dumped weights


def with_weights(rows: Rows, dtype: torch.dtype, wrong: float) -> Rows:
    """Weights as the settings give them, times `wrong` in some places."""
    weights = (rows.fields["old_log_probs"] - rows.fields["rollout_log_probs"]).exp().clamp(max=2.0)
    weights[::3, ::2] *= wrong
    return replace(rows, fields=rows.fields | {"rollout_is_weights": weights.to(dtype)})


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    wrong=st.sampled_from([1.0, 1.01, 2.0]),
    normalize=st.booleans(),
    data=st.data(),
)
def test_the_finding_on_dumped_weights_is_the_same_for_any_split(
    seed: int, dtype: torch.dtype, wrong: float, normalize: bool, data: st.DataObject
) -> None:
    rows = with_weights(make_rows(seed, 8, 0.3, False, False), dtype, wrong)
    chosen = Settings(rollout_is_batch_normalize=normalize)
    states = []
    for first, last in pieces(data, len(rows), "chunks"):
        states.append(AuditState("is-metrics", chosen))
        states[-1].update(rows.batch(first, last))
    assert_same(build_report(merged(data, states)), whole(rows, "is-metrics", chosen))


# Files, through the readers


def write(rows: Rows, folder: Path, sizes: Sequence[int]) -> list[str]:
    """The rows in files of these sizes; masks of several dtypes give the same numbers."""
    folder.mkdir()
    paths, first = [], 0
    for index, (size, dtype) in enumerate(
        zip(sizes, (torch.int64, torch.bool, torch.uint8) * len(sizes), strict=False)
    ):
        part = rows.cut(first, first + size)
        paths.append(str(folder / f"file_{index}.safetensors"))
        save_file({**{k: x.clone() for k, x in part.fields.items()}, "response_mask": part.mask.to(dtype)}, paths[-1])
        first += size
    return paths


WANTED = ("rollout_log_probs", "old_log_probs", "responses")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [1, 3 * WIDTH, 1_000_000], ids=["one-row", "three-rows", "whole-files"])
@pytest.mark.parametrize(("command", "options"), COMMANDS.values(), ids=COMMANDS)
def test_files_read_in_any_chunks_by_any_threads_give_the_report_of_one_file(
    command: str,
    options: dict[str, Any],
    chunk_tokens: int,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = replace(make_rows(11, 40, 0.3, True, True), other_ids=None)
    monkeypatch.setattr(auditing, "CHUNK_TOKENS", chunk_tokens)
    sizes = (3, 0, 17, 1, 19)
    paths = write(rows, tmp_path / "dumps", sizes)
    state = audit(command, open_dumps(paths, WANTED, []), Settings(**options), threads=threads)
    files = dict(zip(paths, (0, 3, 3, 20, 21), strict=True))
    got = as_one_file(build_report(state), files)
    assert [item["sequences"] for item in got.inputs] == list(sizes)
    assert sum(item["valid_tokens"] for item in got.inputs) == got.audited["num_valid_tokens"]
    assert_same(got, whole(rows, command, Settings(**options)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [1, 3 * WIDTH, 1_000_000], ids=["one-row", "three-rows", "whole-files"])
def test_two_sides_in_files_of_their_own_give_the_report_of_one_file(
    chunk_tokens: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(12, 30, 0.3, False, True)
    assert rows.other_ids is not None
    monkeypatch.setattr(auditing, "CHUNK_TOKENS", chunk_tokens)
    ours = replace(rows, fields={name: rows.fields[name] for name in ("rollout_log_probs", "responses")})
    theirs = replace(rows, fields={"old_log_probs": rows.fields["old_log_probs"], "responses": rows.other_ids})
    sizes = (11, 2, 17)
    rollout_paths, train_paths = (write(side, tmp_path / name, sizes) for side, name in ((ours, "a"), (theirs, "b")))
    pairs = open_pairs(rollout_paths, train_paths, [], [], "order")
    state = audit("debug-compare", pairs, Settings(top=6), threads=threads)
    got = as_one_file(build_report(state), dict(zip(rollout_paths, (0, 11, 13), strict=True)))
    assert_same(got, whole(rows, "debug-compare", Settings(top=6)))


ALL_RULES = {
    "rollout_rs": ",".join(SUPPORTED_ROLLOUT_RS_OPTIONS),
    "rollout_rs_threshold": ",".join("0.5_2.0" if "k1" in option else "0.1" for option in SUPPORTED_ROLLOUT_RS_OPTIONS),
}


@pytest.mark.parametrize(
    ("command", "options"), [*COMMANDS.values(), ("is-metrics", ALL_RULES)], ids=[*COMMANDS, "all rules"]
)
def test_a_chunk_is_gone_when_it_was_taken(command: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Not when Python next looks for cycles: by then a dozen chunks are in memory."""
    paths = write(make_rows(13, 40, 0.3, True, True), tmp_path / "dumps", (40,))
    state = AuditState(command, Settings(**options))
    (dump,) = open_dumps(paths, WANTED, [])
    gc.disable()
    try:
        batch = dump.batch(0, 40)
        gone = weakref.ref(batch)
        state.update(batch)
        del batch
        assert gone() is None
    finally:
        gc.enable()
