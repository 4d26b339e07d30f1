"""The command line: parse words, call, print. Results go to stdout, everything else to stderr.

Exit status: 0 fine; 1 a --fail-if gate failed; 2 the user can mend it (one message, no traceback); 3 a fault of this
tool; 130 interrupted. torch is imported inside the commands that compute, so that --help comes at once.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from rollout_audit import __version__
from rollout_audit.errors import AuditError, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rollout_audit.audit import Source
    from rollout_audit.report import Report
    from rollout_audit.state import AuditState

app = typer.Typer(
    name="rollout-audit",
    help="Audit dumped RL batches: how rollout and train log-probs differ, and what that does to importance sampling.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# click's error for wrong words; typer brings its own copy of click since 0.26, so it is reached through typer.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
_PROGRESS_FROM_BYTES = 64 * 2**20

Dumps = Annotated[
    list[str],
    typer.Argument(metavar="DUMP...", help="Files, folders or globs: rank shards of one batch, in any order."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the JSON document instead of tables.")]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:N or mps.", envvar="ROLLOUT_AUDIT_DEVICE", show_default=True)
]
Fields = Annotated[
    list[str],
    typer.Option(
        "--field", metavar="CANONICAL=NAME", help="Which tensor is which field, where its name is unknown. Repeatable."
    ),
]
FailIf = Annotated[
    list[str],
    typer.Option(
        "--fail-if",
        metavar="'METRIC OP NUMBER'",
        help="Exit with 1 when this holds, or the metric is null or absent: 'k3_kl > 0.001'. Repeatable.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No tables, notes or progress: errors, failed gates, --json.")
]
SaveState = Annotated[
    str | None,
    typer.Option("--save-state", metavar="FILE", help="Also write the state, a few KB: `merge` adds states up."),
]
Threads = Annotated[int, typer.Option(help="Worker threads; 0 means one a core.", min=0)]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rollout-audit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a fault of this tool.")] = False,
) -> None:
    """Options before the command."""
    if debug:
        os.environ["ROLLOUT_AUDIT_DEBUG"] = "1"


@app.command("is-metrics")
def is_metrics(
    dumps: Dumps,
    rollout_is: Annotated[
        Literal["token", "sequence", "none"] | None,
        typer.Option(help="Level of the importance weights.  [default: token]"),
    ] = None,
    rollout_is_threshold: Annotated[
        str | None,
        typer.Option(metavar="X|LOW_HIGH", help="2.0 truncates; 0.5_5.0 is IcePop: zero outside.  [default: 2.0]"),
    ] = None,
    rollout_is_batch_normalize: Annotated[
        bool, typer.Option("--rollout-is-batch-normalize", help="Divide applied weights by their mean.")
    ] = False,
    rollout_rs: Annotated[
        str | None,
        typer.Option(
            metavar="OPTION[,OPTION]",
            help="Rejection rules: token_k1..k3, seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2, seq_max_k3.",
        ),
    ] = None,
    rollout_rs_threshold: Annotated[
        str | None,
        typer.Option(metavar="X|LOW_HIGH[,...]", help="One for each rule or one for all, e.g. 0.5_2.0,0.01."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="A named combination of verl 0.9.1, e.g. decoupled_seq_is_rs; options given beside it win.",
            autocompletion=lambda: _presets(),
        ),
    ] = None,
    verl_before_6806: Annotated[
        bool, typer.Option("--verl-before-6806", help="rollout_is_seq_fraction_high/low as before verl PR #6806.")
    ] = False,
    all_tokens: Annotated[
        bool, typer.Option("--all-tokens", help="There is no padding: count every token, use no mask.")
    ] = False,
    json: Json = False,
    device: Device = "cpu",
    field: Fields = [],  # noqa: B006 (typer reads it, nobody changes it)
    fail_if: FailIf = [],  # noqa: B006
    quiet: Quiet = False,
    threads: Threads = 0,
    save_state: SaveState = None,
) -> None:
    """Importance weights, rejection and off-policy metrics (verl's rollout_corr/*), beside the audited values."""
    from rollout_audit.config import choose

    settings = choose(
        preset,
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize or None,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        verl_before_6806=verl_before_6806,
    )
    _check_gates(fail_if)
    from rollout_audit.audit import audit, build_report, check_tokens
    from rollout_audit.readers.dump import check_alike, open_dumps, require_mask
    from rollout_audit.readers.fields import LOG_PROBS, WEIGHTS
    from rollout_audit.readers.paths import find_dumps

    _check_device(device)
    sources = open_dumps(find_dumps(dumps), (*LOG_PROBS, *WEIGHTS), field, masks=not all_tokens)
    for dump in sources if not all_tokens else ():
        require_mask(dump)
    check_alike(sources, needs_pair="--rollout-rs" if settings.rules else "")
    with _progress(sources, quiet) as advance:
        state = audit("is-metrics", sources, settings, device=device, threads=threads or None, progress=advance)
    state.options = {"device": device, "all_tokens": all_tokens}
    _save(state, save_state)
    check_tokens(state)
    _finish(build_report(state), fail_if, json, quiet)


@app.command("debug-compare")
def debug_compare(
    dump: Annotated[str, typer.Argument(metavar="DUMP", help="A file, or a folder or quoted glob of rank shards.")],
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="Train values come from here; rollout values from DUMP.")
    ] = None,
    rollout_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tensor of DUMP with the rollout log-probs.")
    ] = None,
    actor_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tensor of OTHER (or DUMP) with the train log-probs.")
    ] = None,
    match: Annotated[
        Literal["order", "uid"] | None,
        typer.Option(
            help="How rows of DUMP and OTHER belong together.  [default: uid where both files have it, else order]"
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(metavar="K", min=0, max=100_000, help="How many of the worst tokens to list.")
    ] = 10,
    json: Json = False,
    device: Device = "cpu",
    field: Fields = [],  # noqa: B006
    fail_if: FailIf = [],  # noqa: B006
    quiet: Quiet = False,
    threads: Threads = 0,
    save_state: SaveState = None,
) -> None:
    """Differences of probability and log-prob token by token (verl's training/*), and the worst tokens."""
    from rollout_audit.config import Settings

    _check_gates(fail_if)
    if other is None and match is not None:
        raise AuditError(f"--match {match} with one file", wanted="two: DUMP OTHER", do="leave --match out")
    from rollout_audit.audit import audit, build_report
    from rollout_audit.readers.dump import check_alike, note_mask, open_dumps
    from rollout_audit.readers.pair import open_pairs
    from rollout_audit.readers.paths import find_dumps

    _check_device(device)
    rollout_side = [f"rollout_log_probs={rollout_key}"] if rollout_key else []
    train_side = [f"old_log_probs={actor_key}"] if actor_key else []
    sources: list[Source]
    if other is None:
        plain = open_dumps(
            find_dumps([dump]),
            ("rollout_log_probs", "old_log_probs", "responses"),
            [*field, *rollout_side, *train_side],
        )
        check_alike(plain, needs_pair="debug-compare")
        for one in plain:
            note_mask(one)
        sources = [*plain]
    else:
        paths = find_dumps([dump]), find_dumps([other])
        sources = [*open_pairs(*paths, [*field, *rollout_side], [*field, *train_side], match)]
    settings = Settings(top=top)
    with _progress(sources, quiet) as advance:
        state = audit("debug-compare", sources, settings, device=device, threads=threads or None, progress=advance)
    matched = match or ("uid" if getattr(sources[0], "train_row_of", None) is not None else "order")
    state.options = {"device": device} | ({"match": matched} if other else {})
    _save(state, save_state)
    _finish(build_report(state), fail_if, json, quiet)


@app.command("merge")
def merge(
    states: Annotated[
        list[str], typer.Argument(metavar="STATE...", help="Files written by --save-state, with the same settings.")
    ],
    json: Json = False,
    fail_if: FailIf = [],  # noqa: B006
    quiet: Quiet = False,
    save_state: SaveState = None,
) -> None:
    """The report that all files together would have given, from states saved on other machines or at other times."""
    _check_gates(fail_if)
    from rollout_audit.audit import build_report, check_tokens
    from rollout_audit.readers.paths import find_dumps
    from rollout_audit.saving import merge_states

    state = merge_states(find_dumps(states))
    _save(state, save_state)
    if state.command == "is-metrics":
        check_tokens(state)
    _finish(build_report(state), fail_if, json, quiet)


@app.command("inspect")
def inspect(
    dumps: Dumps,
    json: Json = False,
    device: Annotated[str, typer.Option(help="Accepted as by the other commands; nothing is computed on it.")] = "cpu",
    field: Fields = [],  # noqa: B006
    fail_if: FailIf = [],  # noqa: B006
    quiet: Quiet = False,
) -> None:
    """What is in each file: which tensor is which field, shapes, padding, lengths, odd values, what can be computed."""
    _check_gates(fail_if)
    from rollout_audit.inspection import inspect_file, totals
    from rollout_audit.readers.fields import parse_overrides
    from rollout_audit.readers.paths import find_dumps
    from rollout_audit.report import Report

    overrides = parse_overrides(field)
    report = Report("inspect", settings={"device": device, "field": field})
    report.inputs = [inspect_file(path, overrides) for path in find_dumps(dumps)]
    report.add(totals(report.inputs))
    _finish(report, fail_if, json, quiet)


def _save(state: AuditState, path: str | None) -> None:
    from rollout_audit.saving import save_state

    if path is not None:
        save_state(state, path)


def _presets() -> list[str]:
    from rollout_audit.config import PRESETS

    return list(PRESETS)


def _check_gates(expressions: list[str]) -> None:
    """A gate that cannot be read is said before the work, not after it."""
    from rollout_audit.gates import parse

    for expression in expressions:
        parse(expression)


def _check_device(device: str) -> None:
    import torch

    form = re.fullmatch(r"(cpu|cuda|mps)(?::([0-9]+))?", device)
    if form is None:
        raise AuditError(f"--device {device}: no such device", wanted="cpu, cuda, cuda:N or mps")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[form[1]]
    if int(form[2] or 0) >= count:
        found = f"torch {torch.__version__} sees {count} such devices here"
        raise AuditError(f"--device {device}: no such device", found=found, do="--device cpu")


@contextmanager
def _progress(sources: Any, quiet: bool) -> Iterator[Callable[[int], None] | None]:
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


def _finish(report: Report, fail_if: list[str], json: bool, quiet: bool) -> None:
    """Print a report as it was asked for, then decide the exit status."""
    from rollout_audit.gates import check
    from rollout_audit.render.json_document import to_document, to_json
    from rollout_audit.report import failed

    report.gates = check(fail_if, report)
    try:
        if json:
            print(to_json(to_document(report)))
        elif not quiet:
            _print(_tables(report), sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        _hush(sys.stdout)  # the reader has gone (`| head`): say nothing; the gates still decide
    except OSError as exc:
        _hush(sys.stdout)
        raise AuditError(f"the output cannot be written: {exc.strerror}") from None
    if not json and not quiet:
        for note in report.notes:
            if not note.about:
                _tell(f"note: {printable(note.text)}")
    for gate in report.gates:
        if gate.failed and (json or quiet):
            _tell(f"rollout-audit: failed --fail-if '{printable(gate.expression)}': {gate.reason}")
    if failed(report.gates):
        raise typer.Exit(1)


def _tables(report: Report) -> RenderableType:
    encoding = sys.stdout.encoding or "utf-8"
    if report.command == "inspect":
        from rollout_audit.render import inspection

        return inspection.to_tables(report, encoding)
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


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def run(args: list[str]) -> int:
    """Run the command line and answer the exit status."""
    try:
        # Not app(): it answers a closed pipe with 1, as a failed gate, and an interrupt without a word.
        with _command().make_context("rollout-audit", list(args) or ["--help"]) as context:
            _command().invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as exit_:
        return int(exit_.exit_code) if args else 2
    except AuditError as error:
        return _say(str(error), 2)
    except _UsageError as error:
        words = error.ctx.command_path if error.ctx else "rollout-audit"
        return _say(f"{printable(' '.join(error.format_message().split()))}\n  do:     {words} --help", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", 130)
    except BrokenPipeError:
        _hush(sys.stdout)
        return 0
    except Exception as error:  # the outermost boundary: a crash must not look like a failed gate
        if "ROLLOUT_AUDIT_DEBUG" in os.environ:
            traceback.print_exc()
        return _say(
            f"a fault of rollout-audit itself: {type(error).__name__}: {printable(str(error))}\n"
            "  do:     please report it with the output of: rollout-audit --debug COMMAND...",
            3,
        )


def _say(message: str, status: int) -> int:
    _tell(f"rollout-audit: {message}")
    return status


def _tell(text: str) -> None:
    """To stderr; where nobody listens there any more, the exit status says it."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        _hush(sys.stderr)


def _hush(stream: TextIO) -> None:
    """Lead a stream that cannot be written to nowhere, or Python fails once more when it flushes it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> None:
    """Entry point of the `rollout-audit` script."""
    if "_ROLLOUT_AUDIT_COMPLETE" in os.environ:
        app(prog_name="rollout-audit")  # answers the shell's completion and exits
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open to the end)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name that the encoding lacks is no crash
    sys.exit(run(sys.argv[1:]))
