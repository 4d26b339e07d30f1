"""What every command does around its work: checks before it, one report or one of each part, the state to keep."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from rollout_audit.errors import AuditError
from rollout_audit.terminal import Output, finish

if TYPE_CHECKING:
    from rollout_audit.report import Report
    from rollout_audit.state import AuditState


def run_each(
    paths: list[str],
    each: str | None,
    report_on: Callable[[list[str], list[str] | None], Report],
    output: Output,
    save_state: str | None,
) -> None:
    """One report of all paths, or one of each file or step; the exit status is that of the worst."""
    from rollout_audit.readers.layout import by_step, incomplete_steps

    if each is not None and save_state is not None:
        raise AuditError("--save-state with --each: one name for several states", do="leave one of them out")
    if each is None:
        finish(report_on(paths, None), output)
        return
    lacking = incomplete_steps(paths)
    groups: list[tuple[str | int | None, list[str], list[str]]] = (
        [(path, [path], []) for path in paths]
        if each == "file"
        else [(step, inside, lacking[step]) for step, inside in by_step(paths).items()]
    )
    status = 0
    for name, inside, lacks in groups:
        report = report_on(inside, lacks)
        report.extra[each] = name
        try:
            finish(report, output, lines=True)
        except typer.Exit as exit_:
            status = max(status, exit_.exit_code)
    if status:
        raise typer.Exit(status)


def keep_state(state: AuditState, path: str | None) -> None:
    from rollout_audit.saving import save_state

    if path is not None:
        save_state(state, path)


def check_gates(expressions: list[str]) -> None:
    """A gate that cannot be read is said before the work, not after it."""
    from rollout_audit.gates import parse

    for expression in expressions:
        parse(expression)


def check_device(device: str) -> None:
    import torch

    form = re.fullmatch(r"(cpu|cuda|mps)(?::([0-9]+))?", device)
    if form is None:
        raise AuditError(f"--device {device}: no such device", wanted="cpu, cuda, cuda:N or mps")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[form[1]]
    if int(form[2] or 0) >= count:
        found = f"torch {torch.__version__} sees {count} such devices here"
        raise AuditError(f"--device {device}: no such device", found=found, do="--device cpu")
