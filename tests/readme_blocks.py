"""Runs the commands of the README's console blocks; `python tests/readme_blocks.py README.md` rewrites their output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def run(command: str) -> str:
    """What a user sees in a pipe: stdout and stderr of a shell line in the repository."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout.decode()


def blocks(text: str) -> list[str]:
    """Console blocks as they stand."""
    return _BLOCK.findall(text)


def with_output(block: str) -> str:
    """The same block with the output that its commands really have."""
    commands = [line for line in block.splitlines() if line.startswith("$ ")]
    return "".join(f"{command}\n{run(command[2:])}" for command in commands)


def rewrite(text: str) -> str:
    return _BLOCK.sub(lambda match: f"```console\n{with_output(match.group(1))}```", text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(rewrite(path.read_text()))
