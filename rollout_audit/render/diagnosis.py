"""The diagnosis for people: verdict first, one block a finding, then the metrics that have a healthy band."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollout_audit.errors import printable
from rollout_audit.render.tables import SEVERITY_STYLE, box_for, dash, gate_lines, headline, number
from rollout_audit.report import Finding, Report

_VERDICTS = {
    "healthy": ("HEALTHY", "bold green", "nothing is wrong that these log-probs could show"),
    "watch": ("WATCH", "bold yellow", "nothing is surely broken; look at what follows"),
    "faulty": ("FAULTY", "bold red", ""),
    "cannot-audit": ("CANNOT AUDIT", "bold yellow", "there are not two sides to compare"),
}
_STATE_STYLE = {"ok": "green", "watch": "yellow", "bad": "bold red", "unknown": "dim"}


def to_tables(report: Report, encoding: str = "utf-8") -> RenderableType:
    """Everything a person wants to see of a diagnosis."""
    word, style, meaning = _VERDICTS[report.extra["verdict"]]
    verdict = Text(word, style=style)
    if meaning and not (report.findings and report.extra["verdict"] == "watch" and not meaning):
        verdict.append(f": {meaning}", style="default")
    parts: list[RenderableType] = [Text(headline(report), style="bold"), Text(), verdict]
    for finding in report.findings:
        parts += [Text(), *_block(finding)]
    parts += [Text(), _bands(report.extra["bands"], encoding)]
    parts += _rest(report)
    parts += gate_lines(report)
    return Group(*parts)


def _block(finding: Finding) -> list[RenderableType]:
    head = Text(f"{finding.severity.upper()} {finding.code}", style=SEVERITY_STYLE[finding.severity])
    if finding.explains is not None and finding.explains >= 0.005:
        head.append(f"  explains {finding.explains:.0%} of the difference", style="default")
    lines = [Text(finding.summary)]
    for place in finding.where[:3]:
        lines.append(Text("where: " + printable(", ".join(f"{key} {value}" for key, value in place.items()))))
    if finding.remedy:
        lines.append(Text(f"do: {finding.remedy}"))
    lines += [Text(f"    {framework}: {what}", style="dim") for framework, what in finding.settings.items()]
    return [head, *(Padding(line, (0, 0, 0, 2)) for line in lines)]


def _bands(bands: dict[str, dict[str, Any]], encoding: str) -> Table:
    missing = dash(encoding)
    table = Table(box=box_for(encoding), pad_edge=False)
    table.add_column("metric", no_wrap=True)
    for name in ("value", "healthy to", "faulty from"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for metric, band in bands.items():
        value = band["value"]
        shown = missing if value is None else f"{value:.4g}"
        table.add_row(
            metric, shown, f"{band['ok']:g}", f"{band['bad']:g}", Text(band["state"], style=_STATE_STYLE[band["state"]])
        )
    return table


def _rest(report: Report) -> list[RenderableType]:
    lines: list[RenderableType] = []
    undone = any(finding.explains for finding in report.findings)
    remaining = report.extra["remaining_abs_log_ratio"]
    if undone and remaining is not None:
        lines.append(Text(f"left when all this is undone: mean |log ratio| {number(float(f'{remaining:.4g}'), '')}"))
    for item in report.extra["unsure"]:
        lines.append(Text(f"unsure of {item['code']}: {item['needs']}"))
    seen = report.extra["looked_at"]
    if seen and seen["tokens"] < seen["of_tokens"]:
        lines.append(
            Text(
                f"metrics are over all tokens; findings look at {seen['tokens']:,} of {seen['of_tokens']:,} tokens, in "
                f"{seen['sequences']:,} of {seen['of_sequences']:,} rows",
                style="dim",
            )
        )
    if report.correction:
        lines.append(Text(report.correction))
    return lines
