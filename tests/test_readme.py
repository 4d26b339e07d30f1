"""The README says what is so: its outputs are real, every command stands in it, the files of its tree exist."""

from __future__ import annotations

import re
import shutil

import pytest

from rollout_audit.cli import app
from tests.readme_blocks import ROOT, blocks, with_output

README = (ROOT / "README.md").read_text()
CONSOLE = blocks(README)


@pytest.mark.parametrize("block", CONSOLE, ids=[block.splitlines()[0][:60] for block in CONSOLE])
def test_the_output_is_what_the_command_prints(block: str) -> None:
    if "| jq" in block and shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    assert with_output(block) == block


def test_every_command_stands_in_the_readme() -> None:
    names = [command.name for command in app.registered_commands]
    assert names
    assert all(f"`rollout-audit {name} " in README for name in names)


def test_every_command_has_help() -> None:
    assert all(command.callback and command.callback.__doc__ for command in app.registered_commands)


def test_the_tree_names_what_is_there() -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    named = set(re.findall(r"^  (\S+?)/?\s", tree, re.MULTILINE))
    package = ROOT / "rollout_audit"
    hidden = ("__pycache__", "__init__.py", "__main__.py", "py.typed")
    there = {path.name for path in package.iterdir() if path.name not in hidden}
    assert named == there


def test_the_first_screen_shows_a_command_and_its_output() -> None:
    assert README[: README.index("```console")].count("\n") < 15
