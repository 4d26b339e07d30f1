"""diagnose: each fault is named, first and alone; healthy data are left in peace; any split says the same.

Batches come from a small model (tests/simulated.py); faults are made as they happen. The larger labelled set, with what
was measured on it, is in benchmarks/faults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rollout_audit.diagnosis.over_steps import Step, over_steps
from rollout_audit.metrics.rows import RowSample
from tests.conftest import Cli
from tests.simulated import PLAIN, Batch, Model, Sampler, sampled

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "sample_data"
MODEL = Model.random(3)
GENERATOR = np.random.default_rng(5)


def base(**changes: Any) -> Batch:
    return sampled(MODEL, **{"rows": 40, "width": 100, "seed": 1, **changes})


def shift(by: int) -> Callable[[int, Any], Any]:
    """Later by so many positions; what comes in at the end is 0."""

    def move(_: int, values: Any) -> Any:
        moved = np.zeros_like(values)
        if by >= 0:
            moved[by:] = values[: values.size - by]
        else:
            moved[:by] = values[-by:]
        return moved

    return move


def permuted(batch: Batch, order: Any) -> Batch:
    """Rollout values move with their row, padding too."""
    padded = np.where(batch.mask, batch.rollout, 0.0)
    return replace(batch, rollout=padded[order])


def at_last(batch: Batch, value: float) -> Batch:
    rollout = batch.rollout.copy()
    rollout[np.arange(rollout.shape[0]), batch.lengths - 1] = value
    return replace(batch, rollout=rollout)


def some_rows(batch: Batch, other: Batch, rows: list[int]) -> Batch:
    """Train values of these rows from another batch of the same tokens."""
    old = batch.old.copy()
    old[rows] = other.old[rows]
    return replace(batch, old=old)


def jumps(batch: Batch, share: float) -> Batch:
    hit = GENERATOR.random(batch.old.shape) < share
    return replace(batch, old=np.where(hit, batch.old - GENERATOR.uniform(3, 8, hit.shape), batch.old))


def halves(_: int, values: Any) -> Any:
    middle = values.size // 2
    return np.concatenate([values[middle:], values[:middle]])


STALE = MODEL.perturbed(0.3, 1)
FAULTS: dict[str, tuple[str, Callable[[], Batch]]] = {
    "probabilities": ("not-log-probs", lambda: replace(base(), rollout=np.exp(base().rollout))),
    "negated": ("not-log-probs", lambda: replace(base(), old=-base().old)),
    "base 2": ("not-log-probs", lambda: replace(base(), rollout=base().rollout / math.log(2))),
    "0 at each end": ("filler", lambda: at_last(base(), 0.0)),
    "1 at each end": ("filler", lambda: at_last(base(), 1.0)),
    "-9999 once": ("filler", lambda: replace(base(), rollout=np.where(np.arange(100) == 3, -9999.0, base().rollout))),
    "one later": ("shifted", lambda: base().by_row(shift(1))),
    "two earlier": ("shifted", lambda: base().by_row(shift(-2))),
    "far": ("shifted", lambda: base(width=700, rows=12, shortest=650).by_row(shift(120))),
    "every row another lag": ("row-offset", lambda: base().by_row(lambda row, x: np.roll(x, 1 + row % 6))),
    "a third by one": ("row-offset", lambda: base().by_row(lambda row, x: np.roll(x, 1) if row % 3 == 0 else x)),
    "rows turned": ("rows-permuted", lambda: permuted(base(), np.roll(np.arange(40), 1))),
    "six rows exchanged": ("rows-permuted", lambda: permuted(base(), [1, 2, 0, 4, 5, 3, *range(6, 40)])),
    "halves exchanged": ("blocks-permuted", lambda: base(shortest=48).by_row(halves)),
    "T 0.6 in the rollout only": ("temperature", lambda: base(sampler=Sampler(temperature=0.6))),
    "T 0.7 in the trainer only": (
        "temperature",
        lambda: base(sampler=Sampler(temperature=0.7), stored=PLAIN, trainer=Sampler(temperature=0.7)),
    ),
    "T 1.3 in the rollout only": ("temperature", lambda: base(sampler=Sampler(temperature=1.3))),
    "top-p 0.8": ("truncated-sampling", lambda: base(sampler=Sampler(top_p=0.8))),
    "top-p 0.95": ("truncated-sampling", lambda: base(sampler=Sampler(top_p=0.95))),
    "top-k 10": ("truncated-sampling", lambda: base(sampler=Sampler(top_k=10))),
    "min-p": ("truncated-sampling", lambda: base(sampler=Sampler(min_p=0.05))),
    "repetition penalty": ("penalty", lambda: base(sampler=Sampler(repetition=1.1))),
    "presence penalty": ("penalty", lambda: base(sampler=Sampler(presence=0.5))),
    "other weights": ("different-weights", lambda: base(train_model=STALE)),
    "weights change at 40": ("version-switch", lambda: base(before=STALE, switch=40, shortest=70)),
    "noise grows": ("position-growth", lambda: base(width=300, rows=20, growth=0.1, shortest=150)),
    "another prompt": ("turn-start", lambda: base(other_prompt=True, shortest=40)),
    "four rows of other weights": (
        "row-concentrated",
        lambda: some_rows(base(), base(train_model=MODEL.perturbed(0.6, 2)), [3, 9, 20, 31]),
    ),
    "1.5 % far off": ("sparse-outliers", lambda: jumps(base(), 0.015)),
    "a small bias over long rows": (
        "length-amplified",
        lambda: biased(base(width=900, rows=12, shortest=700), -0.002),
    ),
}


def low(batch: Batch) -> Batch:
    """True zeros: confident tokens are 0 to the last bit on both sides."""
    return replace(
        batch,
        rollout=np.where(batch.rollout > -0.02, 0.0, batch.rollout),
        old=np.where(batch.old > -0.02, 0.0, batch.old),
    )


def twice(batch: Batch) -> Batch:
    """Every row two times."""
    order = np.tile(np.arange(len(batch.lengths)), 2)
    return Batch(batch.rollout[order], batch.old[order], batch.ids[order], batch.lengths[order])


def biased(batch: Batch, by: float) -> Batch:
    return replace(batch, old=batch.old + by)


COLD = Sampler(temperature=0.4)
HEALTHY: dict[str, Callable[[], Batch]] = {
    "two engines": base,
    "more noise": lambda: base(noise=0.03),
    "low temperature on both sides": lambda: low(base(sampler=COLD, trainer=COLD)),
    "short rows": lambda: base(rows=150, width=7, shortest=1),
    "two rows": lambda: base(rows=2),
    "one row": lambda: base(rows=1, shortest=80),
    "repetitive": lambda: sampled(Model.random(4, scale=7.0), 40, 100, 2),
    "rows twice": lambda: twice(base()),
    "a few routed elsewhere": lambda: jumps(base(), 0.0008),
    "high entropy": lambda: sampled(Model.random(6, vocabulary=1024, scale=0.7), 40, 100, 3),
    "long rows": lambda: base(width=600, rows=16),
    "top-p in the sampler, raw log-probs": lambda: base(sampler=Sampler(top_p=0.99), stored=PLAIN),
}


def dump(folder: Path, tensors: dict[str, Tensor], name: str = "dump.safetensors", **metadata: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: x.contiguous() for key, x in tensors.items()}, path, metadata or None)
    return path


def loud(document: dict[str, Any]) -> list[str]:
    return [item["code"] for item in document["findings"] if item["severity"] != "info"]


def diagnosed(cli: Cli, *words: object) -> dict[str, Any]:
    answer = cli("diagnose", *words, "--json")
    assert answer.status == 0, answer.err
    return answer.document


# Faults and health


@pytest.mark.parametrize(("code", "make"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_and_no_other(code: str, make: Callable[[], Batch], tmp_path: Path, cli: Cli) -> None:
    document = diagnosed(cli, dump(tmp_path, make().tensors))
    assert loud(document) == [code]
    assert document["verdict"] == ("faulty" if document["findings"][0]["severity"] == "error" else "watch")


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_healthy_data_are_left_in_peace(make: Callable[[], Batch], tmp_path: Path, cli: Cli) -> None:
    document = diagnosed(cli, dump(tmp_path, make().tensors))
    assert loud(document) == []
    assert document["verdict"] in ("healthy", "watch")


@pytest.mark.parametrize(
    ("name", "codes", "verdict"),
    [
        ("healthy.safetensors", [], "healthy"),
        ("step_7", [], "healthy"),
        ("stale_trainer.safetensors", ["different-weights"], "faulty"),
        ("int8_rollout.safetensors", [], "watch"),
        ("empty_rows.safetensors", ["empty-rows"], "watch"),
        ("weights_only.safetensors", ["missing-side"], "cannot-audit"),
    ],
)
def test_the_samples_are_judged_as_they_were_made(name: str, codes: list[str], verdict: str, cli: Cli) -> None:
    document = diagnosed(cli, SAMPLES / name)
    assert (loud(document), document["verdict"]) == (codes, verdict)


def test_two_copies_cannot_be_audited(tmp_path: Path, cli: Cli) -> None:
    tensors = base().tensors
    path = dump(tmp_path, {**tensors, "old_log_probs": tensors["rollout_log_probs"].clone()})
    document = diagnosed(cli, path)
    assert (loud(document), document["verdict"]) == (["identical"], "cannot-audit")
    for severity in ("error", "warning", "watch"):
        assert cli("diagnose", path, "--fail-on", severity, "--quiet").status == 1


# Faults that stack


def test_a_shift_is_undone_and_the_temperature_behind_it_is_seen(tmp_path: Path, cli: Cli) -> None:
    document = diagnosed(cli, dump(tmp_path, base(sampler=Sampler(temperature=0.6)).by_row(shift(1)).tensors))
    assert loud(document) == ["shifted", "temperature"]
    first = document["findings"][0]
    assert first["evidence"]["lag"] == 1
    assert 0.5 < first["explains"] < 1


def test_fillers_are_dropped_and_the_weights_behind_them_are_seen(tmp_path: Path, cli: Cli) -> None:
    document = diagnosed(cli, dump(tmp_path, at_last(base(train_model=STALE), 0.0).tensors))
    assert set(loud(document)) == {"filler", "different-weights"}
    evidence = next(f["evidence"] for f in document["findings"] if f["code"] == "filler")
    assert evidence["tokens"] == 40
    assert evidence["share_on_last_token"] == 1


def test_undoing_a_shift_leaves_what_the_unshifted_batch_has(tmp_path: Path, cli: Cli) -> None:
    plain = diagnosed(cli, dump(tmp_path, base().tensors, "plain.safetensors"))
    moved = diagnosed(cli, dump(tmp_path, base().by_row(shift(1)).tensors))
    assert moved["remaining_abs_log_ratio"] == pytest.approx(plain["remaining_abs_log_ratio"], rel=0.05)


# Reports of users, rebuilt


def test_an_end_token_of_0_in_each_row_is_a_filler(tmp_path: Path, cli: Cli) -> None:
    found = diagnosed(cli, dump(tmp_path, at_last(base(), 0.0).tensors))["findings"][0]
    assert (found["code"], found["evidence"]["share_on_last_token"]) == ("filler", 1.0)


def test_top_p_shows_its_kept_mass_as_the_mean_ratio(tmp_path: Path, cli: Cli) -> None:
    found = diagnosed(cli, dump(tmp_path, base(rows=80, sampler=Sampler(top_p=0.8)).tensors))["findings"][0]
    assert found["code"] == "truncated-sampling"
    assert 0.8 < found["evidence"]["mean_ratio"] < 0.95


def test_a_penalty_has_mean_ratio_1_and_a_geometric_mean_below(tmp_path: Path, cli: Cli) -> None:
    found = diagnosed(cli, dump(tmp_path, base(rows=80, sampler=Sampler(repetition=1.2)).tensors))["findings"][0]
    assert found["code"] == "penalty"
    assert found["evidence"]["mean_ratio"] == pytest.approx(1, abs=0.03)
    assert found["evidence"]["exp_mean_log_ratio"] < 0.98


def test_an_offset_of_575_tokens_is_found(tmp_path: Path, cli: Cli) -> None:
    batch = sampled(MODEL, 6, 1000, 4, shortest=950).by_row(shift(575))
    found = diagnosed(cli, dump(tmp_path, batch.tensors))["findings"][0]
    assert (found["code"], found["evidence"]["lag"]) == ("shifted", 575)


# Where and what it rests on


def test_the_exchanged_rows_are_named(tmp_path: Path, cli: Cli) -> None:
    batch = permuted(base(), [1, 2, 0, 4, 5, 3, *range(6, 40)])
    places = diagnosed(cli, dump(tmp_path, batch.tensors))["findings"][0]["where"]
    belongs = {place["row"]: place["belongs_to_row"] for place in places}
    assert belongs.items() <= {0: 1, 1: 2, 2: 0, 3: 4, 4: 5, 5: 3}.items()


def test_with_too_little_to_go_by_it_says_so(tmp_path: Path, cli: Cli) -> None:
    document = diagnosed(cli, dump(tmp_path, base(rows=3).tensors))
    assert "8 rows and 200 tokens" in document["unsure"][0]["needs"]


def test_what_is_expected_decides(tmp_path: Path, cli: Cli) -> None:
    path = dump(tmp_path, base(train_model=MODEL.perturbed(0.12, 1)).tensors)
    assert loud(diagnosed(cli, path)) == ["different-weights"]
    assert loud(diagnosed(cli, path, "--expect", "quantised")) == []
    mine = tmp_path / "bands.json"
    mine.write_text(json.dumps({"dense": {"log_prob_diff_abs_mean": {"ok": 1.0, "bad": 2.0}}}))
    document = diagnosed(cli, path, "--bands", mine)
    assert loud(document) == []
    assert document["bands"]["log_prob_diff_abs_mean"]["source"] == str(mine)
    mine.write_text('{"dense": {"no_such": 1}}')
    cli("diagnose", path, "--bands", mine).message(f"{mine}: not a file of bands")
    cli("diagnose", path, "--bands", tmp_path / "no").message(f"{tmp_path / 'no'}: cannot be read")


# Any split


def test_any_split_any_threads_and_merged_states_say_the_same(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_audit.state.RowSample", partial(RowSample, 1500))
    tensors = base(sampler=Sampler(temperature=0.6)).tensors
    whole = diagnosed(cli, dump(tmp_path, tensors, "whole.safetensors"))
    parts = [(0, 7), (7, 8), (8, 31), (31, 40)]
    for first, last in parts:
        dump(tmp_path, {name: x[first:last] for name, x in tensors.items()}, f"parts/{first}.safetensors")

    def same(document: dict[str, Any]) -> None:
        for name in ("verdict", "unsure", "looked_at"):
            assert document[name] == whole[name]
        for mine, theirs in zip(document["findings"], whole["findings"], strict=True):
            assert mine["code"] == theirs["code"]
            for name, value in theirs["evidence"].items():
                close = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
                assert mine["evidence"][name] == close

    same(diagnosed(cli, tmp_path / "parts"))
    monkeypatch.setattr("rollout_audit.audit.CHUNK_TOKENS", 300)
    same(diagnosed(cli, tmp_path / "parts", "--threads", "2"))
    for first, _ in parts:
        state = tmp_path / f"states/{first}.state.safetensors"
        state.parent.mkdir(exist_ok=True)
        diagnosed(cli, tmp_path / f"parts/{first}.safetensors", "--save-state", state)
    merged = cli("merge", tmp_path / "states", "--json")
    assert merged.status == 0, merged.err
    same(merged.document)


# Runs


def run_of(folder: Path, means: list[float], versions: list[tuple[int, int]] | None = None) -> Path:
    """Steps of two ranks whose |d| has about these means."""
    for step, mean in enumerate(means):
        for rank in range(2):
            batch = base(rows=16, seed=10 * step + rank)
            noise = np.random.default_rng(step * 2 + rank).normal(0, mean * math.sqrt(math.pi / 2), batch.old.shape)
            stated = {}
            if versions is not None:
                stated = {
                    "rollout_weight_version": str(versions[step][0]),
                    "train_weight_version": str(versions[step][1]),
                }
            name = f"step_{step:03}/rank_{rank}.safetensors"
            dump(folder, replace(batch, old=np.minimum(batch.rollout + noise, 0.0)).tensors, name, **stated)
    return folder


RUNS: dict[str, tuple[list[float], list[str]]] = {
    "steady": ([0.01] * 6, []),
    "up and down a little": ([0.012, 0.009, 0.011, 0.013, 0.01, 0.012], []),
    "a jump that stays": ([0.01, 0.01, 0.3, 0.32, 0.35, 0.36], ["sync-failure"]),
    "saw-tooth": ([0.02, 0.05, 0.09, 0.02, 0.05, 0.1, 0.02, 0.06, 0.1], ["stale-cache"]),
    "growth": ([0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1], ["drift"]),
}


@pytest.mark.parametrize(("means", "codes"), RUNS.values(), ids=RUNS)
def test_a_run_is_read_over_its_steps(means: list[float], codes: list[str], tmp_path: Path, cli: Cli) -> None:
    assert loud(diagnosed(cli, run_of(tmp_path, means))) == codes


def test_stale_weights_that_the_dumps_state_are_by_design(tmp_path: Path, cli: Cli) -> None:
    means = [0.01, 0.3, 0.3, 0.3, 0.3]
    claims = [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4)]
    document = diagnosed(cli, run_of(tmp_path / "stated", means, claims))
    assert [(f["code"], f["severity"]) for f in document["findings"]] == [("different-weights", "warning")]
    claims = [(step, step) for step in range(5)]
    assert loud(diagnosed(cli, run_of(tmp_path / "claimed", means, claims))) == ["sync-failure"]


def test_a_run_of_two_steps_is_no_trend() -> None:
    assert over_steps([Step(0, 0.01, 0.001), Step(1, 0.5, 0.01)], 0.05) is None


# For people


def test_the_verdict_comes_first_and_all_fits_a_terminal(tmp_path: Path, cli: Cli) -> None:
    lines = cli("diagnose", dump(tmp_path, base().by_row(shift(1)).tensors)).out.splitlines()
    assert lines[3:6] == ["", "FAULTY", ""] or lines[4] == "FAULTY"
    assert any(line.startswith("ERROR shifted  explains 9") for line in lines)
    table = [line for line in lines if "log_prob_diff_abs_mean" in line or "prob_pearson" in line]
    assert table
    assert max(map(len, table)) <= 80


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("k3_kl", "formula: avg_t(exp(d) - 1 - d)"),
        ("rollout_corr/k3_kl", "unit:    nats"),
        ("audited/token_mult_prob_error", "formula: mean_t(exp(abs(d)))"),
        ("rollout_rs_seq_mean_k1_seq_max", "formula: max_F(S)"),
        ("shifted", "Try: gather logits[:, :-1] at tokens[:, 1:] on both sides."),
    ],
)
def test_a_name_is_explained(name: str, line: str, cli: Cli) -> None:
    answer = cli("explain", name)
    assert answer.status == 0
    assert line in answer.out.splitlines()


def test_every_number_and_finding_of_a_report_can_be_explained(tmp_path: Path, cli: Cli) -> None:
    tensors = {**base().tensors, "rollout_is_weights": torch.full((40, 100), 9.0)}
    rules = ["--rollout-rs", "token_k1,seq_max_k3", "--rollout-rs-threshold", "0.5_2.0,0.1"]
    path = dump(tmp_path, tensors)
    names = set()
    for words in (["is-metrics", path, *rules], ["debug-compare", path], ["diagnose", path], ["inspect", path]):
        document = cli(*words, "--json").document
        names |= {*document["metrics"], *(f"audited/{name}" for name in document["audited"])}
        names |= {finding["code"] for finding in document["findings"]}
    for name in sorted(names):
        assert cli("explain", name).status == 0, name
    near = cli("explain", "temprature").message("nothing is called temprature")
    assert near["found"] == "near it: temperature"
    assert len(cli("explain").out.splitlines()) > 100


@pytest.mark.parametrize("seed", range(30))
def test_whatever_stands_in_the_tensors_there_is_an_answer(seed: int, tmp_path: Path, cli: Cli) -> None:
    """Constant, periodic, enormous, not finite, tiny, in any pairing and mask: a document, and not a word on stderr."""
    draw = np.random.default_rng(seed)
    rows, width = int(draw.choice([1, 2, 9, 30, 90])), int(draw.choice([1, 5, 40, 130]))
    values = [
        -draw.exponential(1, (rows, width)),
        np.full((rows, width), -1.5),
        np.zeros((rows, width)),
        -1e-9 * draw.random((rows, width)),
        -np.abs(np.sin(np.arange(width) / 3)) * np.ones((rows, 1)),
        -1e30 * draw.random((rows, width)),
        -draw.integers(0, 4, (rows, width)).astype(float),
    ]
    rollout = values[seed % len(values)]
    olds = [
        rollout + 0.01 * draw.normal(size=rollout.shape),
        np.roll(rollout, 1, 1),
        np.roll(rollout, 1, 0),
        rollout[:, ::-1],
        -rollout,
        2 * rollout,
        np.where(draw.random(rollout.shape) < 0.2, np.nan, rollout),
        np.where(draw.random(rollout.shape) < 0.1, -np.inf, rollout),
    ]
    for old in olds:
        mask = draw.random((rows, width)) < draw.choice([0.6, 1.1])
        tensors = {
            "rollout_log_probs": torch.tensor(rollout.copy(), dtype=torch.float32),
            "old_log_probs": torch.tensor(old.copy(), dtype=torch.float32),
            "response_mask": torch.tensor(mask),
        }
        answer = cli("diagnose", dump(tmp_path, tensors), "--json")
        assert answer.status == 0, answer.err
        assert answer.document["verdict"] in ("healthy", "watch", "faulty", "cannot-audit")
