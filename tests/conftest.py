"""Small dumps by hand, and the command line run in this process."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rollout_audit.cli import run

NAN = float("nan")
MASK = [[1, 1, 1], [1, 1, 0]]
ROLLOUT = [[-1.0, -2.0, -3.0], [-0.5, -1.5, NAN]]
OLD = [[-0.5, -1.5, -2.5], [0.0, -1.0, NAN]]
"""Each train log-prob is the rollout's + 0.5, so kl is -0.5; padding holds NaN, which nobody may see."""
IDS = [[11, 12, 13], [21, 22, 0]]


def small() -> dict[str, Tensor]:
    """Two rows, five valid tokens."""
    return {
        "rollout_log_probs": torch.tensor(ROLLOUT),
        "old_log_probs": torch.tensor(OLD),
        "response_mask": torch.tensor(MASK),
        "responses": torch.tensor(IDS),
    }


@dataclass(frozen=True)
class Run:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout as JSON, all of it, and strictly: NaN and Infinity are errors."""
        document: dict[str, Any] = json.loads(self.out, parse_constant=refuse_constant)
        return document

    def message(self, first: str) -> dict[str, str]:
        """The one message of a refused command, which begins with `first`, as its lines by name.

        Exit status 2, nothing on stdout, one sentence after `rollout-audit: `, then wanted, found, do, each indented.
        """
        assert self.status == 2, self
        assert self.out == ""
        head, *rest = self.err.removesuffix("\n").split("\n")
        assert head.startswith(f"rollout-audit: {first}"), self.err
        parts = {"what": head.removeprefix("rollout-audit: ")}
        for line in rest:
            form = re.fullmatch(r"  (wanted|found|do): {1,5}(\S.*)", line)
            assert form, f"not a line of a message: {line!r}"
            assert len(line) - len(form[2]) == 10, "the texts of a message stand below one another"
            parts[form[1]] = form[2]
        assert list(parts) == [name for name in ("what", "wanted", "found", "do") if name in parts]
        return parts


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


Cli = Callable[..., Run]
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CI machine sets must not change an answer; --debug sets a variable, which is taken back here."""
    for name in ("ROLLOUT_AUDIT_DEBUG", "ROLLOUT_AUDIT_DEVICE", "GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command line in this process."""

    def call(*words: object) -> Run:
        capsys.readouterr()
        status = run([str(word) for word in words])
        captured = capsys.readouterr()
        return Run(status, captured.out, captured.err)

    return call


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a dump into the working directory: the small one, with tensors replaced, added, or left out (None)."""
    monkeypatch.chdir(tmp_path)

    def save(name: str = "dump.safetensors", metadata: dict[str, str] | None = None, **changes: Any) -> Path:
        return save_tensors(name, {**small(), **{key: as_tensor(value) for key, value in changes.items()}}, metadata)

    return save


def as_tensor(value: Any) -> Tensor | None:
    return value if value is None or isinstance(value, Tensor) else torch.tensor(value)


def save_tensors(name: str, tensors: Mapping[str, Tensor | None], metadata: dict[str, str] | None = None) -> Path:
    """Write these tensors and no others; None stands for none."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    kept = {key: value.clone().contiguous() for key, value in tensors.items() if value is not None}
    save_file(kept, name, metadata)
    return Path(name)


def save_raw(name: str, header: object, payload: bytes = b"") -> Path:
    """Write a file with this header (bytes, or an object to be dumped as JSON), however wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    Path(name).write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return Path(name)
