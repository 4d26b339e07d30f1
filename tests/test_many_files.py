"""Many files: steps and ranks are recognised, gaps are named, --each and --keep-going do what they say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_audit.cli import run
from rollout_audit.readers.layout import Place, incomplete, place_of
from rollout_audit.readers.paths import find_dumps


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("run/step_7/rank_3.safetensors", Place(7, 3, None)),
        ("run/global_step_0120/rank3.safetensors", Place(120, 3, None)),
        ("iter_0000010/dp-2.safetensors", Place(10, 2, None)),
        ("step-5.safetensors", Place(5, None, None)),
        ("step_5/part-00003-of-00008.safetensors", Place(5, 3, 8)),
        ("experiment_9/dump.safetensors", Place(None, None, None)),
        ("step_1/step_2/rank_0.safetensors", Place(2, 0, None)),
        ("footstep_4/crank_1.safetensors", Place(None, None, None)),
    ],
)
def test_a_path_names_step_and_rank(path: str, place: Place) -> None:
    assert place_of(path) == place


def paths_of(steps: dict[int, list[int]]) -> list[str]:
    return [f"run/step_{step}/rank_{rank}.safetensors" for step, ranks in steps.items() for rank in ranks]


@pytest.mark.parametrize(
    ("steps", "missing"),
    [
        ({0: [0, 1], 1: [0, 1]}, []),
        ({0: [0, 1], 1: [0]}, ["step 1: no file of rank 1 (1 of 2 ranks)"]),
        ({3: [0, 1, 3]}, ["step 3: no file of rank 2 (3 of 4 ranks)"]),
        ({3: [1, 2, 3]}, []),
        ({3: [0, 17]}, []),
    ],
)
def test_a_missing_rank_is_named_and_a_picked_file_is_not(steps: dict[int, list[int]], missing: list[str]) -> None:
    assert incomplete(paths_of(steps)) == missing


def test_i_of_n_says_how_many_there_should_be() -> None:
    paths = [f"step_2/d-{i:05}-of-00004.safetensors" for i in (0, 1, 3)]
    assert incomplete(paths) == ["step 2: no file of rank 2 (3 of 4 ranks)"]


def test_a_step_without_the_marker_of_the_others_is_named(tmp_path: Path) -> None:
    paths = [tmp_path / f"step_{step}" / "rank_0.safetensors" for step in range(3)]
    for path in paths:
        path.parent.mkdir()
    for path in paths[:2]:
        (path.parent / "STABLE").touch()
    (sentence,) = incomplete(str(path) for path in paths)
    assert sentence.startswith("step 2: no STABLE beside ")


def write(path: Path, shift: float, rows: int = 2) -> Path:
    """Every token at train -1, rollout -1 - shift."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = torch.full((rows, 3), -1.0, dtype=torch.float64)
    mask = torch.ones(rows, 3, dtype=torch.uint8)
    save_file({"old_log_probs": old, "rollout_log_probs": old - shift, "response_mask": mask}, path)
    return path


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    """Steps 2, 9 and 10 of two ranks with log ratio step / 100."""
    for step in (9, 10, 2):
        for rank in range(2):
            write(tmp_path / f"step_{step}" / f"rank_{rank}.safetensors", step / 100)
    return tmp_path


def documents(args: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> list[dict[str, object]]:
    assert run([*args, "--json"]) == status
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def kl(document: dict[str, object]) -> float:
    metrics = document["metrics"]
    assert isinstance(metrics, dict)
    return float(metrics["rollout_corr/kl"])


def test_each_step_is_a_line_in_order(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = documents(["is-metrics", str(a_run), "--each", "step"], capsys)
    assert [line["step"] for line in lines] == [2, 9, 10]
    assert [kl(line) for line in lines] == pytest.approx([-0.02, -0.09, -0.1])


def test_each_file_is_a_line_in_order(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = documents(["debug-compare", str(a_run), "--each", "file"], capsys)
    names = [str(Path(str(line["file"])).relative_to(a_run)) for line in lines]
    assert names == [f"step_{step}/rank_{rank}.safetensors" for step in (2, 9, 10) for rank in range(2)]


def test_a_gate_on_each_step_fails_when_one_step_does(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = ["--fail-if", "audited/log_ratio_abs_mean > 0.095"]
    lines = documents(["is-metrics", str(a_run), "--each", "step", *gate], capsys, status=1)
    assert len(lines) == 3


def test_one_state_for_several_reports_is_refused(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["is-metrics", str(a_run), "--each", "step", "--save-state", str(a_run / "s")]) == 2
    assert "--save-state with --each" in capsys.readouterr().err


def test_a_broken_rank_stops_the_run(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = a_run / "step_9" / "rank_1.safetensors"
    broken.write_bytes(broken.read_bytes()[:-5])
    assert run(["is-metrics", str(a_run)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step_9/rank_1.safetensors: not a usable safetensors file: truncated" in captured.err


def test_keep_going_leaves_a_broken_rank_out_and_says_so(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = a_run / "step_9" / "rank_1.safetensors"
    broken.write_bytes(broken.read_bytes()[:-5])
    assert run(["is-metrics", str(a_run), "--keep-going", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["inputs"]) == 5
    assert document["audited"]["num_sequences"] == 10
    codes = {finding["code"]: finding for finding in document["findings"]}
    assert "step_9/rank_1.safetensors" in codes["left-out"]["where"][0]["file"]
    assert codes["incomplete-steps"]["where"] == [{"lacks": "step 9: no file of rank 1 (1 of 2 ranks)"}]


def test_keep_going_leaves_out_a_file_that_breaks_while_it_is_read_and_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_audit.audit.CHUNK_TOKENS", 6)  # two rows a chunk
    good, bad = write(tmp_path / "a.safetensors", 0.5, rows=8), write(tmp_path / "b.safetensors", 7.0, rows=8)
    inode, preadv, reads = bad.stat().st_ino, os.preadv, []

    def fail_late(fd: int, *args: object) -> int:
        if os.fstat(fd).st_ino == inode:
            reads.append(fd)
            if len(reads) > 8 + 7:  # after a look at the mask of each row, in the third chunk
                raise OSError(5, "Input/output error")
        return preadv(fd, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", fail_late)
    assert run(["is-metrics", str(good), str(bad), "--keep-going", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["audited"]["num_sequences"] == 8
    assert kl(document) == pytest.approx(-0.5)
    assert len(reads) > 8 + 7


def test_keep_going_with_nothing_left_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"no")
    (tmp_path / "b.safetensors").write_bytes(b"no")
    assert run(["is-metrics", str(tmp_path), "--keep-going"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("lost", ["rank_1.safetensors", "rank_0.safetensors", "STABLE"])
def test_each_step_is_held_to_what_the_other_steps_have(
    lost: str, a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 9, 10):
        (a_run / f"step_{step}" / "STABLE").touch()
    (a_run / "step_9" / lost).unlink()
    lines = documents(["is-metrics", str(a_run), "--each", "step", "--fail-on", "warning"], capsys, status=1)
    findings = {line["step"]: line["findings"] for line in lines}
    assert findings[2] == findings[10] == []
    assert isinstance(findings[9], list)
    assert [finding["code"] for finding in findings[9]] == ["incomplete-steps"]


def test_a_failed_gate_says_which_step(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["is-metrics", str(a_run), "--each", "step", "-q", "--fail-if", "log_ratio_abs_mean > 0.095"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rollout-audit: step 10: failed --fail-if 'log_ratio_abs_mean > 0.095'")


@pytest.mark.parametrize(("severity", "status"), [("error", 0), ("warning", 1)])
def test_fail_on_takes_findings_of_its_severity_and_worse(
    severity: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "d.safetensors", 0.0)  # both sides equal: a warning
    assert run(["is-metrics", str(path), "--json", "--fail-on", severity]) == status
    captured = capsys.readouterr()
    (gate,) = json.loads(captured.out)["gates"]
    assert gate["expression"] == f"--fail-on {severity}"
    assert gate["failed"] is bool(status)
    assert ("identical" in captured.err) is bool(status)


def test_two_names_of_one_file_count_once(tmp_path: Path) -> None:
    one, hard, soft = (tmp_path / f"{name}.safetensors" for name in ("a", "b", "c"))
    one.write_bytes(b"")
    hard.hardlink_to(one)
    soft.symlink_to(one)
    assert find_dumps([str(tmp_path), str(soft)]) == [str(one)]
