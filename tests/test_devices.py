"""Every device gives the CPU's report: cuda to 1e-9, mps, which has no float64, to 1e-5.

On a machine without either, the same code runs against a device of the tests (tests/elsewhere.py) that refuses what
cuda refuses: it says that no operation mixes devices, and nothing of cuda's kernels or of time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_audit.audit import audit, build_report
from rollout_audit.config import SUPPORTED_ROLLOUT_RS_OPTIONS, Settings
from rollout_audit.diagnosing import build_diagnosis
from rollout_audit.diagnosis.magnitude import load_bands
from rollout_audit.readers.dump import open_dumps
from rollout_audit.render.json_document import to_document
from tests.elsewhere import NAME, another_device
from tests.test_goldens import VERL

SAMPLES = Path(__file__).parent.parent / "sample_data"
DUMPS = {path.stem: path for folder in (SAMPLES, VERL) for path in sorted(folder.glob("*.safetensors"))}
ALL_RULES = {
    "rollout_rs": ",".join(SUPPORTED_ROLLOUT_RS_OPTIONS),
    "rollout_rs_threshold": ",".join("0.5_2.0" if "k1" in option else "0.1" for option in SUPPORTED_ROLLOUT_RS_OPTIONS),
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "token, all rules": ("is-metrics", ALL_RULES),
    "sequence": ("is-metrics", {"rollout_is": "sequence", "rollout_is_batch_normalize": True}),
    "icepop": ("is-metrics", {"rollout_is_threshold": "0.7_1.4"}),
    "debug-compare": ("debug-compare", {"top": 5}),
    "diagnose": ("diagnose", {}),
}
CASES = [
    pytest.param(path, *run, id=f"{name}-{title}")
    for name, path in DUMPS.items()
    for title, run in RUNS.items()
    if name not in ("no_mask", "weights_only") or (name == "weights_only" and title in ("sequence", "icepop"))
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def report(path: Path, command: str, options: dict[str, Any], device: str) -> dict[str, Any]:
    dumps = open_dumps([str(path)], ("rollout_log_probs", "old_log_probs", "rollout_is_weights", "responses"), [])
    state = audit(command, dumps, Settings(**options), device=device, threads=1)
    state.options = {"device": "", "expect": "dense", "bands": None}
    return to_document(build_diagnosis(state, load_bands("dense")) if command == "diagnose" else build_report(state))


def differing(got: Any, wanted: Any, relative: float, absolute: float, where: str = "") -> Iterator[str]:
    """Where two documents differ by more."""
    if isinstance(wanted, dict):
        assert list(got) == list(wanted), where
        for key in wanted:
            yield from differing(got[key], wanted[key], relative, absolute, f"{where}/{key}")
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), where
        for index, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            yield from differing(mine, theirs, relative, absolute, f"{where}/{index}")
    elif isinstance(wanted, float) and isinstance(got, float):
        if not math.isclose(got, wanted, rel_tol=relative, abs_tol=absolute):
            yield f"{where}: {got} for {wanted}"
    elif got != wanted:
        yield f"{where}: {got} for {wanted}"


@pytest.mark.parametrize(("path", "command", "options"), CASES)
def test_another_device_gives_the_report_of_the_cpu(path: Path, command: str, options: dict[str, Any]) -> None:
    wanted = report(path, command, options, "cpu")
    with another_device() as device:
        got = report(path, command, options, NAME)
    assert device.calls > 10, "the work was done elsewhere"
    assert not list(differing(got, wanted, 1e-9, 1e-12))


@pytest.mark.parametrize(("command", "options"), RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", ["healthy", "int8_rollout", "empty_rows"])
def test_a_device_without_float64_gives_nearly_that(
    name: str, command: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_audit.batch._WITHOUT_FLOAT64", (NAME,))
    wanted = report(DUMPS[name], command, options, "cpu")["metrics"]
    with another_device(has_float64=False):
        got = report(DUMPS[name], command, options, NAME)["metrics"]
    assert not list(differing(got, wanted, 1e-5, 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize(("path", "command", "options"), CASES)
@pytest.mark.parametrize(("device", "relative"), [("cuda", 1e-9), ("mps", 1e-5)])
def test_a_gpu_gives_the_report_of_the_cpu(
    device: str, relative: float, path: Path, command: str, options: dict[str, Any]
) -> None:
    there = torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()
    if not there:
        pytest.skip(f"no {device} here")
    wanted, got = (report(path, command, options, where)["metrics"] for where in ("cpu", device))
    assert not list(differing(got, wanted, relative, relative / 100 if device == "cuda" else 1e-5))
