"""The command line: parse words, call, print. Results go to stdout, everything else to stderr.

Exit status: 0 fine; 1 a --fail-if gate failed; 2 the user can mend it (one message, no traceback); 3 a fault of this
tool; 130 interrupted. torch is imported inside the commands that compute, so that --help comes at once.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rollout_audit import __version__
from rollout_audit.errors import AuditError, printable
from rollout_audit.options import (
    Device,
    Dumps,
    Each,
    Engine,
    FailIf,
    FailOn,
    FailOnVerdict,
    Fields,
    Json,
    KeepGoing,
    Quiet,
    RayAddress,
    SaveState,
    Threads,
)
from rollout_audit.running import check_device, check_gates, keep_state, run_each
from rollout_audit.terminal import Output, finish, hush, progress_of, tell

if TYPE_CHECKING:
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
    fail_on: FailOn = None,
    quiet: Quiet = False,
    threads: Threads = 0,
    save_state: SaveState = None,
    each: Each = None,
    keep_going: KeepGoing = False,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """IS weights, rejection, KL, perplexity (verl's rollout_corr/*)."""
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
    check_gates(fail_if)
    from rollout_audit.audit import audit, build_report, check_tokens
    from rollout_audit.engine_ray import open_engine
    from rollout_audit.readers.dump import check_alike, open_dumps
    from rollout_audit.readers.fields import LOG_PROBS, WEIGHTS
    from rollout_audit.readers.paths import find_dumps

    check_device(device)

    def report_on(paths: list[str], lacking: list[str] | None) -> Report:
        left_out: list[str] = []
        broken = left_out if keep_going else None
        sources = open_dumps(paths, (*LOG_PROBS, *WEIGHTS), field, masks=not all_tokens, left_out=broken)
        check_alike(sources, needs_pair="--rollout-rs" if settings.rules else "")
        with open_engine(engine, ray_address, threads, device) as ray, progress_of(sources, quiet) as advance:
            state = audit(
                "is-metrics",
                sources,
                settings,
                device=device,
                threads=threads or None,
                progress=advance,
                keep_going=keep_going,
                engine=ray,
            )
        state.options = {"device": device, "all_tokens": all_tokens}
        state.left_out = left_out + state.left_out
        keep_state(state, save_state)
        check_tokens(state)
        return build_report(state, lacking)

    run_each(find_dumps(dumps), each, report_on, Output(fail_if, fail_on, json, quiet), save_state)


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
    fail_on: FailOn = None,
    quiet: Quiet = False,
    threads: Threads = 0,
    save_state: SaveState = None,
    each: Each = None,
    keep_going: KeepGoing = False,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """Differences token by token (verl's training/*)."""
    from rollout_audit.config import Settings

    check_gates(fail_if)
    if other is None and match is not None:
        raise AuditError(f"--match {match} with one file", wanted="two: DUMP OTHER", do="leave --match out")
    from rollout_audit.audit import audit, build_report
    from rollout_audit.engine_ray import open_engine
    from rollout_audit.readers.dump import check_alike, note_mask, open_dumps
    from rollout_audit.readers.pair import open_pairs
    from rollout_audit.readers.paths import find_dumps

    check_device(device)
    rollout_side = [f"rollout_log_probs={rollout_key}"] if rollout_key else []
    train_side = [f"old_log_probs={actor_key}"] if actor_key else []
    settings = Settings(top=top)

    def open_all(paths: list[str], broken: list[str] | None) -> list[Source]:
        if other is not None:
            return [*open_pairs(paths, find_dumps([other]), [*field, *rollout_side], [*field, *train_side], match)]
        wanted = ("rollout_log_probs", "old_log_probs", "responses")
        plain = open_dumps(paths, wanted, [*field, *rollout_side, *train_side], left_out=broken)
        check_alike(plain, needs_pair="debug-compare")
        for one in plain:
            note_mask(one)
        return [*plain]

    def report_on(paths: list[str], lacking: list[str] | None) -> Report:
        left_out: list[str] = []
        sources = open_all(paths, left_out if keep_going else None)
        with open_engine(engine, ray_address, threads, device) as ray, progress_of(sources, quiet) as advance:
            state = audit(
                "debug-compare",
                sources,
                settings,
                device=device,
                threads=threads or None,
                progress=advance,
                keep_going=keep_going,
                engine=ray,
            )
        matched = match or ("uid" if getattr(sources[0], "train_row_of", None) is not None else "order")
        state.options = {"device": device} | ({"match": matched} if other else {})
        state.left_out = left_out + state.left_out
        keep_state(state, save_state)
        return build_report(state, lacking)

    if other is not None and each is not None:
        raise AuditError("--each with two sides", wanted="DUMP alone", do="compare file by file in a loop")
    run_each(find_dumps([dump]), each, report_on, Output(fail_if, fail_on, json, quiet), save_state)


@app.command("diagnose")
def diagnose(
    dumps: Dumps,
    expect: Annotated[
        Literal["dense", "moe", "quantised"],
        typer.Option(help="What the model is: decides how much difference is healthy.", show_default=True),
    ] = "dense",
    bands: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON with healthy bands of your own, metric by metric.")
    ] = None,
    rollout_is_threshold: Annotated[
        str | None,
        typer.Option(metavar="X|LOW_HIGH", help="Threshold that dumped weights were cut at.  [default: 2.0]"),
    ] = None,
    json: Json = False,
    device: Device = "cpu",
    field: Fields = [],  # noqa: B006
    fail_if: FailIf = [],  # noqa: B006
    fail_on: FailOnVerdict = None,
    quiet: Quiet = False,
    threads: Threads = 0,
    save_state: SaveState = None,
    each: Each = None,
    keep_going: KeepGoing = False,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> None:
    """What is wrong, where, and what to do."""
    from rollout_audit.config import choose

    settings = choose(None, rollout_is_threshold=rollout_is_threshold)
    check_gates(fail_if)
    from rollout_audit.audit import audit
    from rollout_audit.diagnosing import build_diagnosis
    from rollout_audit.diagnosis.magnitude import load_bands
    from rollout_audit.engine_ray import open_engine
    from rollout_audit.readers.dump import check_alike, note_mask, open_dumps
    from rollout_audit.readers.fields import LOG_PROBS, WEIGHTS
    from rollout_audit.readers.paths import find_dumps

    check_device(device)
    healthy = load_bands(expect, bands)

    def report_on(paths: list[str], lacking: list[str] | None) -> Report:
        left_out: list[str] = []
        broken = left_out if keep_going else None
        sources = open_dumps(paths, (*LOG_PROBS, *WEIGHTS, "responses"), field, left_out=broken)
        check_alike(sources, needs_pair="")
        for source in sources:
            note_mask(source)
        with open_engine(engine, ray_address, threads, device) as ray, progress_of(sources, quiet) as advance:
            state = audit(
                "diagnose",
                sources,
                settings,
                device=device,
                threads=threads or None,
                progress=advance,
                keep_going=keep_going,
                engine=ray,
            )
        state.options = {"device": device, "expect": expect, "bands": bands}
        state.left_out = left_out + state.left_out
        keep_state(state, save_state)
        return build_diagnosis(state, healthy, lacking)

    run_each(find_dumps(dumps), each, report_on, Output(fail_if, fail_on, json, quiet), save_state)


@app.command("merge")
def merge(
    states: Annotated[
        list[str], typer.Argument(metavar="STATE...", help="Files written by --save-state, with the same settings.")
    ],
    json: Json = False,
    fail_if: FailIf = [],  # noqa: B006
    fail_on: FailOn = None,
    quiet: Quiet = False,
    save_state: SaveState = None,
) -> None:
    """One report of states that --save-state wrote."""
    check_gates(fail_if)
    from rollout_audit.audit import build_report, check_tokens
    from rollout_audit.readers.paths import find_dumps
    from rollout_audit.saving import merge_states

    state = merge_states(find_dumps(states))
    keep_state(state, save_state)
    if state.command == "is-metrics":
        check_tokens(state)
    report = _diagnosis_of(state) if state.command == "diagnose" else build_report(state)
    finish(report, Output(fail_if, fail_on, json, quiet))


def _diagnosis_of(state: AuditState) -> Report:
    from rollout_audit.diagnosing import build_diagnosis
    from rollout_audit.diagnosis.magnitude import load_bands

    return build_diagnosis(state, load_bands(state.options["expect"], state.options["bands"]))


@app.command("inspect")
def inspect(
    dumps: Dumps,
    json: Json = False,
    device: Annotated[str, typer.Option(help="Accepted as by the other commands; nothing is computed on it.")] = "cpu",
    field: Fields = [],  # noqa: B006
    fail_if: FailIf = [],  # noqa: B006
    fail_on: FailOn = None,
    quiet: Quiet = False,
) -> None:
    """What is in a file, what can be computed."""
    check_gates(fail_if)
    from rollout_audit.inspection import inspect_file, totals
    from rollout_audit.readers.fields import parse_overrides
    from rollout_audit.readers.paths import find_dumps
    from rollout_audit.report import Report

    overrides = parse_overrides(field)
    report = Report("inspect", settings={"device": device, "field": field})
    report.inputs = [inspect_file(path, overrides) for path in find_dumps(dumps)]
    report.add(totals(report.inputs))
    finish(report, Output(fail_if, fail_on, json, quiet))


@app.command("explain")
def explain(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A metric or a finding; without one, all names are listed.")
    ] = None,
) -> None:
    """What a metric or a finding means."""
    from rollout_audit import explanation

    print("\n".join(explanation.names()) if name is None else explanation.explain(name))


def _presets() -> list[str]:
    from rollout_audit.config import PRESETS

    return list(PRESETS)


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
        hush(sys.stdout)
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
    tell(f"rollout-audit: {message}")
    return status


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
