"""The command line's habits: what it prints where, with which status, and that it counts as the API does."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_audit import __version__
from rollout_audit.cli import main, run
from rollout_audit.readers.paths import find_dumps, natural_key
from tests.conftest import MASK, OLD, ROLLOUT, Cli, Write
from tests.test_goldens import CASES, VERL, close

PROGRAM = [sys.executable, "-m", "rollout_audit"]
LOG_2 = math.log(2)


def imported_by(*words: str) -> set[str]:
    """Top-level modules that a command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "rollout_audit", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}


# What is loaded


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["is-metrics", "--help"]])
def test_help_and_version_come_without_torch(words: list[str]) -> None:
    modules = imported_by(*words)
    assert "typer" in modules
    assert not modules & {"torch", "numpy", "safetensors"}


def test_inspect_comes_without_torch() -> None:
    modules = imported_by("inspect", str(VERL / "bf16.safetensors"))
    assert "numpy" in modules
    assert not modules & {"torch", "safetensors"}


def test_help_names_every_command_and_version_is_one_line(cli: Cli) -> None:
    help_ = cli("--help")
    assert help_.status == 0
    for name in ("is-metrics", "debug-compare", "inspect"):
        assert re.search(rf"^  {name} ", help_.out, re.MULTILINE)
        assert cli(name, "-h").out.startswith(f"Usage: rollout-audit {name} [OPTIONS]")
    assert cli("--version").out == f"rollout-audit {__version__}\n"


def test_no_words_print_the_help_and_are_an_error(cli: Cli) -> None:
    answer = cli()
    assert answer.status == 2
    assert answer.out == cli("--help").out


# The numbers


def test_all_408_stored_results_of_verl_come_out_of_the_command_line(cli: Cli) -> None:
    assert len(CASES) == 408
    for case in CASES:
        words = [case["command"], str(VERL / case["dump"]), "--json", "--threads", "1"]
        settings = case["settings"]
        if case["command"] == "is-metrics":
            words += ["--rollout-is", settings.get("rollout_is") or "none"]
        for name in ("rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"):
            if name in settings:
                words += ["--" + name.replace("_", "-"), str(settings[name])]
        if settings.get("rollout_is_batch_normalize"):
            words.append("--rollout-is-batch-normalize")
        answer = cli(*words)
        assert answer.status == 0, words
        got, expected = answer.document["metrics"], case["metrics"]
        assert list(got) == list(expected), words
        for key, value in expected.items():
            # A number that verl makes NaN or infinite is null in JSON.
            same = got[key] is None if not math.isfinite(float(value)) else close(got[key], value)
            assert same, (words, key, got[key], value)


def test_a_hand_sum(write: Write, cli: Cli) -> None:
    """Two rows, valid ratios 2, 1, 1/2 and 4, 1: weights at most 2."""
    steps = [[LOG_2, 0.0, -LOG_2], [2 * LOG_2, 0.0, 7.0]]
    rollout = torch.tensor(ROLLOUT, dtype=torch.float64).nan_to_num(0.0)
    path = write(rollout_log_probs=rollout, old_log_probs=rollout + torch.tensor(steps, dtype=torch.float64))
    document = cli("is-metrics", path, "--json").document
    metrics = {key.removeprefix("rollout_corr/"): value for key, value in document["metrics"].items()}
    assert metrics["rollout_is_mean"] == pytest.approx((2 + 1 + 0.5 + 2 + 1) / 5, rel=1e-12)
    assert metrics["rollout_is_max"] == pytest.approx(2, rel=1e-12)
    assert metrics["kl"] == pytest.approx(-2 * LOG_2 / 5, rel=1e-12)
    assert metrics["k3_kl"] == pytest.approx((2 + 1 + 0.5 + 4 + 1 - 5 - 2 * LOG_2) / 5, rel=1e-12)
    assert metrics["chi2_token"] == pytest.approx((4 + 1 + 0.25 + 16 + 1) / 5 - 1, rel=1e-12)
    # the products are 1 and 4
    assert metrics["chi2_seq"] == pytest.approx((1 + 16) / 2 - 1, rel=1e-12)
    assert document["audited"]["truncated_token_fraction"] == pytest.approx(1 / 5)
    assert document["audited"]["num_valid_tokens"] == 5
    assert document["denominators"]["truncated_token_fraction"] == {"count": 5, "of": "valid tokens"}
    assert document["inputs"][0]["padded_tokens"] == 6


PRESETS: dict[str, tuple[str | None, str | float, str | None, str | float | None]] = {
    # verl 0.9.1, RolloutCorrectionConfig: each factory's rollout_is, its threshold, rollout_rs, its threshold
    "decoupled_token_is": ("token", 2.0, None, None),
    "decoupled_seq_is": ("sequence", 2.0, None, None),
    "decoupled_token_icepop": ("token", "0.5_5.0", None, None),
    "decoupled_seq_is_rs": ("sequence", 2.0, "seq_sum_k1", "0.5_2.0"),
    "decoupled_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001"),
    "bypass_ppo_clip": (None, 2.0, None, None),
    "bypass_ppo_clip_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001"),
    "bypass_ppo_clip_k3_rs": (None, 2.0, "seq_mean_k3", 0.01),
    "bypass_pg_is": ("sequence", 2.0, None, None),
    "bypass_pg_token_icepop": ("token", "0.5_5.0", None, None),
    "bypass_pg_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001"),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001"),
    "decoupled_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001"),
    "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001"),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001"),
    "decoupled_k3_rs": (None, 2.0, "seq_mean_k3", 0.01),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, "seq_mean_k3", 0.01),
    "decoupled_k3_rs_token_tis": ("token", 2.0, "seq_mean_k3", 0.01),
    "disabled": (None, 2.0, None, None),
}


def test_all_19_presets_of_verl_are_there_and_no_other(write: Write, cli: Cli) -> None:
    known = cli("is-metrics", write(), "--preset", "none").message("no preset 'none'")["wanted"]
    assert sorted(known.split(", ")) == sorted(PRESETS)
    assert len(PRESETS) == 19


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_its_settings_are(preset: str, cli: Cli) -> None:
    rollout_is, threshold, rollout_rs, rs_threshold = PRESETS[preset]
    path = VERL / "wide_mismatch.safetensors"
    document = cli("is-metrics", path, "--json", "--preset", preset).document
    assert document["settings"] == {
        "preset": preset,
        "rollout_is": rollout_is,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": False,
        "rollout_rs": rollout_rs,
        "rollout_rs_threshold": rs_threshold,
        "verl_before_6806": False,
        "device": "cpu",
        "all_tokens": False,
    }
    words: list[object] = ["--rollout-is", rollout_is or "none", "--rollout-is-threshold", threshold]
    if rollout_rs is not None:
        words += ["--rollout-rs", rollout_rs, "--rollout-rs-threshold", rs_threshold]
    spelled_out = cli("is-metrics", path, "--json", *words).document
    assert document["metrics"] == spelled_out["metrics"]
    assert document["audited"] == spelled_out["audited"]


def test_an_option_beside_a_preset_wins(write: Write, cli: Cli) -> None:
    words = ["--preset", "decoupled_seq_is_rs", "--rollout-is", "token", "--rollout-rs-threshold", "0.9_1.1"]
    settings = cli("is-metrics", write(), *words, "--json").document["settings"]
    assert settings["preset"] == "decoupled_seq_is_rs"
    assert settings["rollout_is"] == "token"
    assert (settings["rollout_rs"], settings["rollout_rs_threshold"]) == ("seq_sum_k1", "0.9_1.1")
    settings = cli("is-metrics", write(), "--preset", "decoupled_k3_rs", "--rollout-rs", "none", "--json").document
    assert not [key for key in settings["metrics"] if "rollout_rs" in key]


# Several files


def shards(write: Write) -> None:
    """One batch of eight rows as one file and as rank files of 3, 4 and 1 rows."""
    generator = torch.Generator().manual_seed(7)
    rollout = -torch.rand(8, 5, generator=generator, dtype=torch.float64)
    old = rollout + 0.3 * torch.randn(8, 5, generator=generator, dtype=torch.float64)
    mask = (torch.arange(5) < torch.tensor([5, 1, 3, 0, 4, 2, 5, 1])[:, None]).long()
    parts = {"one.safetensors": (0, 8)} | {
        f"run/step_7/rank_{rank}.safetensors": rows for rank, rows in ((2, (0, 3)), (9, (3, 7)), (10, (7, 8)))
    }
    for name, (first, last) in parts.items():
        tensors = {"rollout_log_probs": rollout, "old_log_probs": old, "response_mask": mask}
        write(name, responses=None, **{key: value[first:last] for key, value in tensors.items()})


@pytest.mark.parametrize("command", ["is-metrics", "debug-compare"])
def test_rank_files_a_folder_and_a_glob_give_the_numbers_of_one_file(command: str, write: Write, cli: Cli) -> None:
    shards(write)
    whole = cli(command, "one.safetensors", "--json").document
    step = "run/step_7"
    words: list[list[str]] = [["run"], [f"{step}/rank_*.safetensors"], ["run/**/*.safetensors"]]
    if command == "is-metrics":
        words.append([f"{step}/rank_10.safetensors", f"{step}/rank_2.safetensors", "run"])
    for dumps in words:
        split = cli(command, *dumps, "--json").document
        assert [Path(dump["path"]).name for dump in split["inputs"]] == [
            "rank_2.safetensors",
            "rank_9.safetensors",
            "rank_10.safetensors",
        ]
        for part in ("metrics", "audited"):
            assert list(split[part]) == list(whole[part])
            for key, value in whole[part].items():
                assert split[part][key] == (value and pytest.approx(value, rel=1e-12, abs=1e-15)), key
        assert split["denominators"] == whole["denominators"]
        assert [finding["code"] for finding in split["findings"]] == [f["code"] for f in whole["findings"]]


def test_worst_tokens_of_rank_files_name_their_file_and_row(write: Write, cli: Cli) -> None:
    shards(write)
    whole = cli("debug-compare", "one.safetensors", "--json").document["worst_tokens"]
    split = cli("debug-compare", "run", "--json").document["worst_tokens"]
    offset = {"rank_2.safetensors": 0, "rank_9.safetensors": 3, "rank_10.safetensors": 7}
    assert [token | {"row": token["row"] + offset[Path(token["path"]).name], "path": ""} for token in split] == [
        token | {"path": ""} for token in whole
    ]


def test_numbers_in_names_are_ordered_as_numbers() -> None:
    names = ["step_10/a", "step_9/rank_10", "step_9/rank_9", "step_9/rank", "a", "10", "9", "step_009/b"]
    assert sorted(names, key=natural_key) == [
        *["9", "10", "a", "step_009/b", "step_9/rank", "step_9/rank_9", "step_9/rank_10", "step_10/a"]
    ]


def test_each_file_is_counted_once_however_often_it_is_named(write: Write) -> None:
    write("run/a.safetensors")
    write("run/b.safetensors")
    Path("run/c.safetensors").symlink_to("a.safetensors")
    words = ["run/b.safetensors", "run", "./run/*.safetensors", str(Path("run/a.safetensors").resolve())]
    assert [Path(path).name for path in find_dumps(words)] == ["a.safetensors", "b.safetensors"]


def test_a_name_with_brackets_is_a_name_before_it_is_a_pattern(write: Write) -> None:
    write("run[1]/rank[0].safetensors")
    assert find_dumps(["run[1]/rank[0].safetensors"]) == ["run[1]/rank[0].safetensors"]
    assert find_dumps(["run[1]"]) == ["run[1]/rank[0].safetensors"]


def test_two_steps_in_one_batch_are_noted(write: Write, cli: Cli) -> None:
    write("run/step_9/rank_0.safetensors")
    write("run/step_10/rank_0.safetensors")
    answer = cli("is-metrics", "run")
    assert "note: 2 training steps (9 to 10) were taken as one batch" in answer.err


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_the_number_of_threads_does_not_matter(threads: int, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_audit.audit.CHUNK_TOKENS", 4096)
    path = VERL / "larger.safetensors"
    chunked = cli("is-metrics", path, "--json", "--threads", threads).document["metrics"]
    monkeypatch.undo()
    whole = cli("is-metrics", path, "--json").document["metrics"]
    for key, value in whole.items():
        assert chunked[key] == pytest.approx(value, rel=1e-11, abs=1e-14), key


# Gates


GATES = [
    # the small dump's kl is -0.5; a gate that is met fails the run
    ("kl < 0", True, "rollout_corr/kl"),
    ("kl<0", True, "rollout_corr/kl"),
    ("  kl  <=  -0.5  ", True, "rollout_corr/kl"),
    ("kl == -0.5", True, "rollout_corr/kl"),
    ("kl >= -5e-1", True, "rollout_corr/kl"),
    ("kl > -.6", True, "rollout_corr/kl"),
    ("kl != 0", True, "rollout_corr/kl"),
    ("kl > 0", False, "rollout_corr/kl"),
    ("kl != -0.5", False, "rollout_corr/kl"),
    ("rollout_corr/kl > +1", False, "rollout_corr/kl"),
    ("rollout_corr/kl < 1", True, "rollout_corr/kl"),
    ("audited/kl_rollout_train_k1 < 0", True, "audited/kl_rollout_train_k1"),
    ("kl_rollout_train_k1 < 0", True, "audited/kl_rollout_train_k1"),
    ("num_valid_tokens == 5", True, "audited/num_valid_tokens"),
    ("num_valid_tokens < 5", False, "audited/num_valid_tokens"),
    ("training_ppl > 1000", False, "rollout_corr/training_ppl"),
    ("audited/training_ppl > 1000", False, "audited/training_ppl"),
]


@pytest.mark.parametrize(("expression", "failed", "key"), GATES)
def test_a_gate_fails_when_its_condition_holds(expression: str, failed: bool, key: str, write: Write, cli: Cli) -> None:
    answer = cli("is-metrics", write(), "--json", "--fail-if", expression)
    assert answer.status == int(failed)
    document = answer.document
    (gate,) = document["gates"]
    assert (gate["expression"], gate["failed"], gate["key"]) == (expression, failed, key)
    values = document["metrics"] | {f"audited/{name}": value for name, value in document["audited"].items()}
    assert gate["value"] == values[key]
    if failed:
        assert answer.err == f"rollout-audit: failed --fail-if '{expression}': {gate['reason']}\n"
    else:
        assert answer.err == ""


@pytest.mark.parametrize("operator", ["<", "<=", ">", ">=", "==", "!="])
def test_a_gate_on_a_number_that_could_not_be_computed_fails(operator: str, write: Write, cli: Cli) -> None:
    answer = cli("is-metrics", write(rollout_log_probs=None), "--json", "--fail-if", f"k3_kl {operator} 0.1")
    assert answer.status == 1
    (gate,) = answer.document["gates"]
    assert gate == {
        "expression": f"k3_kl {operator} 0.1",
        "key": "rollout_corr/k3_kl",
        "value": None,
        "failed": True,
        "reason": "rollout_corr/k3_kl could not be computed: the dump has no rollout_log_probs",
    }


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("k3kl", "; did you mean rollout_corr/k3_kl"),
        ("rollout_corr/rollout_is_maen", "; did you mean rollout_corr/rollout_is_mean"),
        ("ess_token", "; did you mean audited/ess_tokens"),
        ("training/kl", "; did you mean rollout_corr/kl"),
        ("zzz", ""),
    ],
)
def test_a_gate_on_a_metric_that_is_not_there_fails_and_names_those_that_are_near(
    name: str, hint: str, write: Write, cli: Cli
) -> None:
    answer = cli("is-metrics", write(), "--json", "--fail-if", f"{name} > 1e9")
    assert answer.status == 1
    reason = answer.document["gates"][0]["reason"]
    assert reason.startswith(f"no metric {name} in this report{hint}")
    assert reason.endswith("report") == (not hint)


def test_one_failed_gate_of_several_is_enough_and_each_is_reported(write: Write, cli: Cli) -> None:
    words = ["--fail-if", "kl > 0", "--fail-if", "kl < 0", "--fail-if", "gone < 0"]
    answer = cli("is-metrics", write(), *words)
    assert answer.status == 1
    lines = [line for line in answer.out.splitlines() if "--fail-if" in line]
    assert lines[0] == "passed  --fail-if 'kl > 0': rollout_corr/kl is -0.5"
    assert lines[1] == "FAILED  --fail-if 'kl < 0': rollout_corr/kl is -0.5"
    assert lines[2].startswith("FAILED  --fail-if 'gone < 0': no metric gone in this report")
    assert cli("is-metrics", write(), "--fail-if", "kl > 0").status == 0


def test_gates_work_for_every_command(write: Write, cli: Cli) -> None:
    assert cli("debug-compare", write(), "--json", "--fail-if", "log_ratio_mean == 0.5").status == 1
    assert cli("debug-compare", write(), "--json", "--fail-if", "rollout_probs_diff_valid != 1").status == 0
    assert cli("inspect", write(), "--json", "--fail-if", "num_nonfinite_padding > 1").status == 1
    assert cli("inspect", write(), "--json", "--fail-if", "num_nonfinite_values > 0").status == 0


# Streams


@pytest.mark.parametrize("command", ["is-metrics", "debug-compare", "inspect"])
def test_with_json_stdout_is_one_document_whatever_happens(command: str, write: Write, cli: Cli) -> None:
    path = write(
        response_mask=None, attention_mask=MASK, rollout_log_probs=None, train_old=OLD, generation_logprobs=OLD
    )
    answer = cli(command, path, "--json", "--fail-if", "gone > 1")
    assert answer.status == 1
    assert answer.document["command"] == command
    assert answer.err.count("\n") == 1, "notes are in the document"
    quiet = cli(command, path, "--json", "--quiet", "--fail-if", "gone > 1")
    assert (quiet.out, quiet.err) == (answer.out, answer.err)


@pytest.mark.parametrize("command", ["is-metrics", "debug-compare", "inspect"])
def test_quiet_prints_failed_gates_only(command: str, write: Write, cli: Cli) -> None:
    path = write(response_mask=None, attention_mask=MASK)
    assert cli(command, path, "-q") == cli(command, path, "--quiet", "--fail-if", "num_valid_tokens < 0")
    silent = cli(command, path, "-q")
    assert (silent.status, silent.out, silent.err) == (0, "", "")
    failed = cli(command, path, "-q", "--fail-if", "num_valid_tokens == 5", "--fail-if", "num_valid_tokens == 6")
    assert (failed.status, failed.out) == (1, "")
    assert failed.err == ("rollout-audit: failed --fail-if 'num_valid_tokens == 5': audited/num_valid_tokens is 5\n")


def test_notes_go_to_stderr_and_stand_in_the_document(write: Write, cli: Cli) -> None:
    path = write(old_log_probs=None, train_log_probs=OLD)
    note = "dump.safetensors: train_log_probs was taken for old_log_probs (another name of old_log_probs)"
    for command in ("is-metrics", "debug-compare"):
        answer = cli(command, path)
        assert answer.err == f"note: {note}\n"
        assert "was taken for" not in answer.out
        document = cli(command, path, "--json").document
        assert {"text": note, "about": []} in document["notes"]
        assert document["inputs"][0]["fields"]["old_log_probs"] == {
            "name": "train_log_probs",
            "dtype": "F32",
            "shape": [2, 3],
        }


def test_debug_compare_without_a_mask_counts_everything_and_says_so(write: Write, cli: Cli) -> None:
    old, rollout = [[-1.0, -2.0]], [[-1.5, -2.0]]
    path = write(old_log_probs=old, rollout_log_probs=rollout, response_mask=None, responses=None)
    answer = cli("debug-compare", path)
    assert answer.status == 0
    assert "every position was counted, padding too" in answer.err
    masked = write(
        old_log_probs=old, rollout_log_probs=rollout, response_mask=None, responses=None, attention_mask=[[1, 1, 0]]
    )
    answer = cli("debug-compare", masked, "--json")
    assert answer.document["audited"]["num_valid_tokens"] == 1
    assert "the last 2 columns of attention_mask were taken" in answer.document["notes"][0]["text"]


def test_is_metrics_takes_all_tokens_only_when_it_is_told_to(write: Write, cli: Cli) -> None:
    path = write(old_log_probs=[[-1.0, -2.0]], rollout_log_probs=[[-1.5, -2.0]], response_mask=[[1, 0]], responses=None)
    assert cli("is-metrics", path, "--json").document["metrics"]["rollout_corr/kl"] == -0.5
    document = cli("is-metrics", path, "--json", "--all-tokens").document
    assert document["metrics"]["rollout_corr/kl"] == -0.25
    assert (document["settings"]["all_tokens"], document["inputs"][0]["mask"]) == (True, "all")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("words", "shown"), [([], True), (["--json"], True), (["--quiet"], False)])
def test_progress_is_shown_on_a_terminal_only_and_never_on_stdout(
    words: list[str], shown: bool, write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_audit.terminal._PROGRESS_FROM_BYTES", 0)
    monkeypatch.setenv("TERM", "xterm")
    without = cli("is-metrics", write(), *words)
    assert without.err == "", "not in a pipe"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli("is-metrics", write(), *words).out == without.out
    assert ("bytes" in terminal.getvalue()) == shown


def test_on_a_terminal_there_are_colours_and_on_a_dumb_one_none(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for term, coloured in (("xterm-256color", True), ("dumb", False)):
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setenv("TERM", term)
            patch.delenv("NO_COLOR", raising=False)
            patch.setattr(sys, "stdout", terminal)
            assert run(["inspect", str(write())]) == 0
        assert ("\x1b[" in terminal.getvalue()) == coloured
        assert "old_log_probs" in terminal.getvalue()


# Tables


@pytest.mark.parametrize("environment", [{}, {"GITHUB_ACTIONS": "true", "FORCE_COLOR": "1", "COLUMNS": "20"}])
@pytest.mark.parametrize("command", ["is-metrics", "debug-compare", "inspect"])
def test_in_a_pipe_nothing_is_cut_coloured_or_wrapped(
    command: str, environment: dict[str, str], write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    long_name = "x" * 150
    path = write(f"{long_name}.safetensors", **{"y" * 150: MASK}, old_log_probs=[[0.25, -1.5, -2.5], [0.0, -1.0, 0.0]])
    answer = cli(command, path, "--fail-if", "no_such_metric_" + "z" * 150 + " > 1")
    for stream in (answer.out, answer.err):
        assert "\x1b" not in stream
        assert "…" not in stream
        assert not re.search(r"[ \t]$", stream, re.MULTILINE)
    assert long_name in answer.out
    assert "no metric no_such_metric_" + "z" * 150 + " in this report" in answer.out
    if command == "inspect":
        assert "y" * 150 in answer.out
    else:
        document = cli(command, path, "--json").document
        for key in document["metrics"]:
            assert re.search(rf"^ {key.rsplit('/')[-1]} ", answer.out, re.MULTILINE), key
        (finding,) = document["findings"]
        assert f"ERROR positive-log-prob: {finding['summary']}\n  do: {finding['remedy']}\n" in answer.out


def test_the_table_is_a_view_of_the_document(write: Write, cli: Cli) -> None:
    path = write(response_mask=[[1, 1, 1], [0, 0, 0]])
    document = cli("is-metrics", path, "--json", "--rollout-is", "sequence").document
    lines = cli("is-metrics", path, "--rollout-is", "sequence").out.splitlines()
    assert lines[0] == "is-metrics  dump.safetensors"
    assert lines[1] == "2 sequences, 3 valid tokens of 6 (50%)"
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(" ")}
    for key, value in document["metrics"].items():
        short = key.removeprefix("rollout_corr/")
        expected = "—" if value is None else f"{value:.6g}"
        assert rows[short][0] == expected, key
        audited = document["audited"].get(short, value)
        differs = audited is None or value is None or not math.isclose(audited, value, rel_tol=1e-7)
        if short in document["audited"] and differs and audited != value:
            assert rows[short][1] == ("—" if audited is None else f"{audited:.6g}"), key
        else:
            assert len(rows[short]) == 1, key
    # verl takes the empty row for weight 0, the auditor leaves it out
    assert rows["rollout_is_seq_min"][0] == "0"
    assert rows["rollout_is_seq_min"][1] == "2"


def test_reasons_of_nulls_stand_under_the_table(write: Write, cli: Cli) -> None:
    answer = cli("is-metrics", write(rollout_log_probs=None))
    assert "the dump has no rollout_log_probs" in answer.out
    assert answer.err == ""


def test_ascii_is_enough_for_stdout(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(rollout_log_probs=None)
    for name, encoding in (("ascii.txt", "ascii"), ("latin.txt", "latin-1"), ("utf8.txt", "utf-8")):
        with monkeypatch.context() as patch, open(name, "w", encoding=encoding, errors="strict") as stdout:
            patch.setattr(sys, "stdout", stdout)
            for command in ("is-metrics", "inspect"):
                patch.setattr(sys, "argv", ["rollout-audit", command, str(path)])
                with pytest.raises(SystemExit) as ended:
                    main()
                assert ended.value.code == 0
    assert Path("ascii.txt").read_bytes().isascii()
    assert re.search(r"k3_kl +\| +- \|", Path("ascii.txt").read_text())
    assert " —\n" in Path("utf8.txt").read_text(encoding="utf-8")
    assert Path("latin.txt").read_bytes() == Path("ascii.txt").read_bytes()


def test_json_is_ascii_and_holds_any_name(write: Write, cli: Cli) -> None:
    answer = cli("inspect", write("日本\udcff.safetensors"), "--json")
    assert answer.out.isascii()
    assert answer.document["inputs"][0]["path"] == "日本\udcff.safetensors"


def test_typers_help_has_no_codes_in_ci(write: Write) -> None:
    environment = os.environ | {"GITHUB_ACTIONS": "true", "FORCE_COLOR": "1"}
    done = subprocess.run([*PROGRAM, "is-metrics", "--help"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "--rollout-is-threshold" in done.stdout


@pytest.mark.skipif(shutil.which("rollout-audit", path=str(Path(sys.executable).parent)) is None, reason="no script")
def test_the_installed_script_is_the_same_program(write: Write) -> None:
    write()
    script = Path(sys.executable).parent / "rollout-audit"
    both = [
        subprocess.run([*program, "inspect", "dump.safetensors", "--json"], capture_output=True, text=True, check=True)
        for program in ([str(script)], PROGRAM)
    ]
    assert json.loads(both[0].stdout) == json.loads(both[1].stdout)


def test_the_shell_completes_commands_and_presets() -> None:
    def complete(words: str, place: int) -> list[str]:
        environment: dict[str, Any] = os.environ | {
            "_ROLLOUT_AUDIT_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(place),
        }
        done = subprocess.run(PROGRAM, capture_output=True, text=True, env=environment)
        return done.stdout.split()

    assert complete("rollout-audit i", 1) == ["is-metrics", "inspect"]
    assert complete("rollout-audit is-metrics --preset decoupled_k3", 3) == [
        "decoupled_k3_rs",
        "decoupled_k3_rs_seq_tis",
        "decoupled_k3_rs_token_tis",
    ]
