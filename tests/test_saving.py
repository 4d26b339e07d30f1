"""A saved state is the state: merged in any order it gives the report of the whole, and nothing else gets in."""

from __future__ import annotations

import json
import math
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollout_audit.cli import run
from rollout_audit.saving import STATE_VERSION
from rollout_audit.tails import Tail
from tests.conftest import Cli

SAMPLE = Path(__file__).parent.parent / "sample_data" / "healthy.safetensors"
GOLDENS = Path(__file__).parent / "goldens" / "verl"
COMMANDS = {
    "token": ["is-metrics"],
    "sequence-rs": ["is-metrics", "--rollout-is", "sequence", "--rollout-rs", "token_k1,seq_max_k3",
                    "--rollout-rs-threshold", "0.5_2.0,0.05"],
    "icepop": ["is-metrics", "--rollout-is-threshold", "0.5_5.0", "--rollout-is-batch-normalize"],
    "debug": ["debug-compare", "--top", "7"],
    "diagnose": ["diagnose"],
}  # fmt: skip


def parts_of(dump: str, tmp_path: Path, cuts: tuple[int, ...]) -> list[str]:
    """The rows of a golden dump in several files, last part with NaN on a valid token."""
    tensors = load_file(GOLDENS / dump)
    names = []
    for i, (first, last) in enumerate(zip((0, *cuts), (*cuts, len(tensors["responses"])), strict=True)):
        part = {name: x[first:last].clone() for name, x in tensors.items()}
        names.append(str(tmp_path / f"rank_{i}.safetensors"))
        save_file(part, names[-1])
    return names


def document(args: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run([*args, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def assert_equal(got: Any, expected: Any, place: str = "") -> None:
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), place
        for key in expected:
            assert_equal(got[key], expected[key], f"{place}/{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), place
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other, place)
    elif isinstance(expected, float) and got is not None:
        assert math.isclose(got, expected, rel_tol=1e-12, abs_tol=1e-12), (place, got, expected)
    else:
        assert got == expected, place


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("dump", ["larger.safetensors", "empty_row.safetensors", "bf16.safetensors"])
def test_states_merged_in_any_order_give_the_report_of_the_whole(
    words: list[str], dump: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = parts_of(dump, tmp_path, (1, 3))
    whole = document([words[0], str(tmp_path), *words[1:]], capsys)
    states = [path.replace(".safetensors", ".state") for path in files]
    for path, state in zip(files, states, strict=True):
        assert run([words[0], path, *words[1:], "--save-state", state, "--quiet"]) == 0
    for order in permutations(states):
        assert_equal(document(["merge", *order], capsys), whole)


def test_a_merged_state_can_be_saved_and_merged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = parts_of("ragged.safetensors", tmp_path, (2, 4))
    whole = document(["is-metrics", *files], capsys)
    states = [f"{path}.state" for path in files]
    for path, state in zip(files, states, strict=True):
        run(["is-metrics", path, "--save-state", state, "--quiet"])
    both = str(tmp_path / "both.state")
    run(["merge", *states[:2], "--save-state", both, "--quiet"])
    assert_equal(document(["merge", both, states[2]], capsys), whole)


def test_a_state_of_many_tokens_is_small(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(64, 4096, generator=generator)
    mask = torch.ones(64, 4096, dtype=torch.uint8)
    save_file(
        {"old_log_probs": old, "rollout_log_probs": old + 0.01, "response_mask": mask}, tmp_path / "d.safetensors"
    )
    state = tmp_path / "d.state"
    assert run(["is-metrics", str(tmp_path / "d.safetensors"), "--save-state", str(state), "--quiet"]) == 0
    assert state.stat().st_size < 40_000 + 8 * Tail().limit, "statistics, and the largest weights"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "ragged.state"
    assert run(["is-metrics", str(GOLDENS / "ragged.safetensors"), "--save-state", str(path), "--quiet"]) == 0
    return path


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["is-metrics", "--rollout-is-threshold", "3.0"], "rollout_is_threshold differs"),
        (["is-metrics", "--rollout-is", "sequence"], "rollout_is differs"),
        (["debug-compare"], "command differs"),
    ],
)
def test_states_of_other_settings_are_refused_by_name(
    words: list[str], what: str, state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(tmp_path / "other.state")
    run([words[0], str(GOLDENS / "larger.safetensors"), *words[1:], "--save-state", other, "--quiet"])
    assert what in refused(["merge", str(state), other], capsys)


def test_a_file_is_not_counted_twice(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.state"
    copy.write_bytes(state.read_bytes())
    assert "ragged.safetensors was counted in another state already" in refused(
        ["merge", str(state), str(copy)], capsys
    )


def rewritten(path: Path, **metadata: str) -> str:
    """The state with other metadata."""
    with safe_open(path, "pt") as file:
        tensors, known = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, path, known | metadata)
    return str(path)


def test_another_version_is_refused(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(["merge", rewritten(state, version="0")], capsys)
    assert "a state of another version" in message
    assert f"version {STATE_VERSION}" in message


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"command": "is-metrics"}', "null", "nonsense"])
def test_a_damaged_state_is_one_message(damage: str, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "a damaged state" in refused(["merge", rewritten(state, state=damage)], capsys)


def test_a_state_makes_no_objects_but_statistics(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with safe_open(state, "pt") as file:
        text = file.metadata()["state"]
    evil = text.replace('"class": "Coverage"', '"class": "Popen"')
    assert evil != text
    assert "a damaged state" in refused(["merge", rewritten(state, state=evil)], capsys)


def test_a_dump_is_no_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a saved state" in refused(["merge", str(GOLDENS / "ragged.safetensors")], capsys)


def test_a_state_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tmp_path / "nowhere" / "x.state")
    assert "no such folder" in refused(
        ["is-metrics", str(GOLDENS / "ragged.safetensors"), "--save-state", where], capsys
    )
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_dump_is_not_overwritten_by_a_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "dump.safetensors"
    dump.write_bytes((GOLDENS / "ragged.safetensors").read_bytes())
    assert "not overwritten" in refused(["is-metrics", str(dump), "--save-state", str(dump)], capsys)
    assert dump.read_bytes() == (GOLDENS / "ragged.safetensors").read_bytes()


def test_a_state_may_be_written_again(state: Path) -> None:
    assert run(["is-metrics", str(GOLDENS / "ragged.safetensors"), "--save-state", str(state), "--quiet"]) == 0


@pytest.mark.parametrize("command", ["is-metrics", "debug-compare", "diagnose"])
def test_a_field_of_another_kind_is_a_damaged_state(command: str, tmp_path: Path, cli: Cli) -> None:
    """Whatever stands where a number or a list belongs, the answer is a message."""
    path, broken = tmp_path / "a.state", tmp_path / "b.state"
    assert cli(command, SAMPLE, "--quiet", "--save-state", path).status == 0
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    document = json.loads(metadata["state"])
    for where in fields_of(document):
        changed = json.loads(metadata["state"])
        *way, last = where
        inner = changed
        for step in way:
            inner = inner[step]
        for value in ("x", None, [1], {"a": 1}):
            inner[last] = value
            save_file(tensors, broken, {**metadata, "state": json.dumps(changed)})
            assert cli("merge", path, broken, "--quiet").status in (0, 2), (where, value)


def fields_of(value: object, way: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Ways to the first number of each class, and to each part."""
    if not isinstance(value, dict):
        return [way]
    found = [step for key in list(value)[:3] for step in fields_of(value[key], (*way, key))]
    return found[:12]
