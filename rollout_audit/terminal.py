"""What goes to the terminal: results to stdout; progress, notes and errors to stderr. Nothing else prints."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import typer

from rollout_audit.errors import AuditError, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rollout_audit.report import Report

_PROGRESS_FROM_BYTES = 64 * 2**20


@contextmanager
def progress_of(sources: Any, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """A bar with rate and time left, on a terminal, for work that is worth one."""
    total = sum(source.num_bytes for source in sources)
    if quiet or total < _PROGRESS_FROM_BYTES or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda done: bar.update(task, advance=done)


@dataclass(frozen=True)
class Output:
    """How the user wants the report, and what decides the exit status."""

    fail_if: list[str]
    fail_on: str | None
    json: bool
    quiet: bool


def finish(report: Report, output: Output, lines: bool = False) -> None:
    """Print a report as it was asked for, then decide the exit status."""
    from rollout_audit.gates import check, check_findings
    from rollout_audit.render.json_document import to_document, to_json
    from rollout_audit.report import failed

    report.gates = check(output.fail_if, report) + check_findings(output.fail_on, report)
    try:
        if output.json:
            print(to_json(to_document(report), one_line=lines))
        elif not output.quiet:
            _print(_tables(report), sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        hush(sys.stdout)  # the reader has gone (`| head`): say nothing; the gates still decide
    except OSError as exc:
        hush(sys.stdout)
        raise AuditError(f"the output cannot be written: {exc.strerror}") from None
    name = next((f"{word} {report.extra[word]}: " for word in ("step", "file") if word in report.extra), "")
    if not output.json and not output.quiet:
        for note in report.notes:
            if not note.about:
                tell(f"note: {printable(name + note.text)}")
    for gate in report.gates:
        if gate.failed and (output.json or output.quiet):
            tell(f"rollout-audit: {printable(name)}failed {printable(gate.words)}: {printable(gate.reason)}")
    if failed(report.gates):
        raise typer.Exit(1)


def _tables(report: Report) -> RenderableType:
    encoding = sys.stdout.encoding or "utf-8"
    if report.command == "inspect":
        from rollout_audit.render import inspection

        return inspection.to_tables(report, encoding)
    if report.command == "diagnose":
        from rollout_audit.render import diagnosis

        return diagnosis.to_tables(report, encoding)
    from rollout_audit.render import tables

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return tables.to_tables(report, encoding, width)


def _print(content: RenderableType, stream: TextIO) -> None:
    """On a terminal as wide as it is; in a pipe nothing is coloured, wrapped or cut."""
    from rich.console import Console

    if stream.isatty():
        Console(file=stream, highlight=False).print(content)
        return
    console = Console(file=stream, highlight=False, color_system=None, force_terminal=False, width=100_000)
    with console.capture() as capture:
        console.print(content)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()), file=stream)


def tell(text: str) -> None:
    """To stderr; where nobody listens there any more, the exit status says it."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        hush(sys.stderr)


def hush(stream: TextIO) -> None:
    """Lead a stream that cannot be written to nowhere, or Python fails once more when it flushes it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
