"""Options that several commands share, spelled once."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

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
FailOn = Annotated[
    Literal["error", "warning"] | None,
    typer.Option(help="Exit with 1 when there is a finding of this severity or worse."),
]
FailOnVerdict = Annotated[
    Literal["error", "warning", "watch"] | None,
    typer.Option(
        "--fail-on", help="Exit with 1 for a finding of this severity or worse; watch: for any verdict but healthy."
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No tables, notes or progress: errors, failed gates, --json.")
]
SaveState = Annotated[
    str | None,
    typer.Option("--save-state", metavar="FILE", help="Also write the state, some KB: `merge` adds states up."),
]
Each = Annotated[
    Literal["file", "step"] | None,
    typer.Option(
        help="A report for each file or training step instead of one; with --json one line each (JSON Lines)."
    ),
]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Leave out files that cannot be read, and say so, instead of stopping.")
]
Threads = Annotated[int, typer.Option(help="Worker threads; 0 means one a core.", min=0)]
Engine = Annotated[Literal["threads", "ray"], typer.Option(help="Who does the work: this process, or tasks of Ray.")]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="A Ray cluster.  [default: $RAY_ADDRESS, else one that starts and ends here]"),
]
