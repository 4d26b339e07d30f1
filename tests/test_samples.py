"""The samples give what sample_data/README.md and expected.json say, which verl's own functions computed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollout_audit.cli import run

SAMPLES = Path(__file__).parent.parent / "sample_data"
EXPECTED: dict[str, dict[str, float]] = json.loads((SAMPLES / "expected.json").read_text())
README = (SAMPLES / "README.md").read_text()


def documents(name: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What the commands say of a sample; is-metrics refuses a dump without a mask, debug-compare one of weights."""
    result = []
    for command in ("is-metrics", "debug-compare"):
        status = run([command, str(SAMPLES / name), "--json"])
        out = capsys.readouterr().out
        if status == 0:
            result.append(json.loads(out))
        else:
            assert (command, name) in (
                ("is-metrics", "no_mask.safetensors"),
                ("debug-compare", "weights_only.safetensors"),
            )
    return result


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_gives_verls_numbers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    got: dict[str, float] = {}
    for document in documents(name, capsys):
        got |= {key: value for key, value in document["audited"].items() if key.startswith("num_")}
        if document["command"] == "is-metrics":
            got |= {f"audited/{key}": value for key, value in document["audited"].items()}
        got |= document["metrics"]
    for key, value in EXPECTED[name].items():
        assert got[key] == pytest.approx(value, rel=1e-9, abs=1e-10), key


def test_the_readmes_numbers_are_those_of_expected_json() -> None:
    names = {name.removesuffix(".safetensors"): values for name, values in EXPECTED.items()}
    checked = 0
    for table in re.findall(r"\n\|  \|(.*?)\n(?=\n)", README, re.DOTALL):
        header, _, *rows = table.splitlines()
        columns = [column.strip() for column in header.strip(" |").split("|")]
        for row in rows:
            key, *cells = [cell.strip(" `") for cell in row.strip(" |").split("|")]
            for column, cell in zip(columns, cells, strict=True):
                if cell == "\u2014":
                    assert key not in names[column]
                else:
                    assert float(cell) == pytest.approx(names[column][key], rel=1e-5), (column, key)
                    checked += 1
    assert checked == 13 * 4 + 2 * 13 + 6 + 5


def test_a_healthy_sample_has_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("healthy.safetensors", "step_7", "int8_rollout.safetensors", "stale_trainer.safetensors"):
        assert [document["findings"] for document in documents(name, capsys)] == [[], []]


def test_the_samples_are_small_and_readable_by_anyone() -> None:
    files = [path for path in SAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 2_000_000


def test_every_sample_stands_in_the_readme() -> None:
    names = {path.relative_to(SAMPLES).parts[0] for path in SAMPLES.rglob("*.safetensors")}
    assert names == set(EXPECTED)
    assert all(f"`{name}" in README for name in names)
