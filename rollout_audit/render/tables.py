"""Tables for people: the framework's number and the audited one side by side, then findings, gates and notes."""

from __future__ import annotations

import math
import os
from typing import Any

from rich.box import ASCII2, SIMPLE_HEAD, Box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollout_audit.errors import printable
from rollout_audit.report import AFTER, FINITE_TOKENS, KEPT_TOKENS, SEQUENCES, TOKENS, Number, Report

_WIDE = 100
_SHORT = {TOKENS: "tokens", FINITE_TOKENS: "finite tokens", KEPT_TOKENS: "kept tokens", SEQUENCES: "sequences"}
SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def box_for(encoding: str) -> Box:
    """Lines that the terminal's encoding has."""
    return SIMPLE_HEAD if encoding.lower().replace("-", "") in ("utf8", "utf16") else ASCII2


def dash(encoding: str) -> str:
    """What stands for a number that could not be computed."""
    return "\u2014" if box_for(encoding) is SIMPLE_HEAD else "-"


def number(value: Number, missing: str) -> str:
    """Six significant digits; the dash for None."""
    if value is None:
        return missing
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def to_tables(report: Report, encoding: str = "utf-8", width: int | None = None) -> RenderableType:
    """Everything a person wants to see of a report. File names and header text are never read as markup.

    On a terminal too narrow for all columns the last one goes, not the digits.
    """
    parts: list[RenderableType] = [Text(headline(report), style="bold")]
    box, missing = box_for(encoding), dash(encoding)
    if report.metrics:
        parts.append(_metrics(report, box, missing))
    rest = {key: value for key, value in report.audited.items() if key not in _shared(report)}
    if rest:
        parts.append(_audited(report, rest, box, missing, width or _WIDE))
    if report.extra.get("worst_tokens"):
        parts.append(_worst_tokens(report.extra["worst_tokens"], box, missing))
    if report.extra.get("token_id_differences"):
        parts.append(_id_differences(report.extra["token_id_differences"], box))
    if report.correction:
        parts.append(Text(report.correction))
    parts += [_finding(finding) for finding in report.findings]
    parts += gate_lines(report)
    parts += [Text(_reason(note.text, note.about, missing), style="dim") for note in report.notes if note.about]
    return Group(*parts)


def gate_lines(report: Report) -> list[Text]:
    """One line a gate: failed or passed, and why."""
    return [
        Text(
            f"{'FAILED' if gate.failed else 'passed'}  {gate.words}: {gate.reason}",
            style="bold red" if gate.failed else "green",
        )
        for gate in report.gates
    ]


def headline(report: Report) -> str:
    """Command, files, size and settings."""
    names = " and ".join(f"{item['side']} side: {item['path']}" for item in report.inputs[:2] if "side" in item)
    if not names or len(report.inputs) > 2:
        names = report.inputs[0]["path"] if len(report.inputs) == 1 else f"{len(report.inputs)} files"
    for word in ("step", "file"):
        if word in report.extra:
            names = f"{word} {report.extra[word]}" + ("" if word == "file" else f"  ({names})")
    rows, tokens = report.audited.get("num_sequences"), report.audited.get("num_valid_tokens")
    padded = sum(item["padded_tokens"] for item in report.inputs if item.get("side") != "train")
    size = f"{rows:,} sequences, {tokens:,} valid tokens"
    if padded and tokens is not None:
        size += f" of {padded:,} ({tokens / padded:.0%})"
    lines = [f"{report.command}  {printable(names)}", size]
    hidden = {"device", "top"} | ({"rollout_is_threshold"} if report.settings.get("rollout_is") is None else set())
    shown = {key: value for key, value in report.settings.items() if key not in hidden}
    settings = [f"{key}={value}" for key, value in shown.items() if value not in (None, False)]
    if settings:
        lines.append(", ".join(settings))
    return "\n".join(lines)


def _shared(report: Report) -> set[str]:
    return {key.rsplit("/", 1)[-1] for key in report.metrics} & set(report.audited)


def _metrics(report: Report, box: Box, missing: str) -> Table:
    prefix = next(iter(report.metrics)).rsplit("/", 1)[0]
    table = Table(box=box, pad_edge=False)
    table.add_column(f"{prefix}/", no_wrap=True)
    table.add_column("verl 0.9.1", justify="right", no_wrap=True)
    table.add_column("audited", justify="right", no_wrap=True)
    for key, value in report.metrics.items():
        short = key.rsplit("/", 1)[-1]
        audited = report.audited.get(short, value)
        table.add_row(Text(short), number(value, missing), "" if _same(value, audited) else number(audited, missing))
    return table


def _same(value: Number, other: Number) -> bool:
    """Whether two numbers agree but for float32's rounding of fractions."""
    return value == other or (value is not None and other is not None and math.isclose(value, other, rel_tol=1e-7))


def _audited(report: Report, values: dict[str, Number], box: Box, missing: str, width: int) -> Table:
    """Audited values that have no verl twin; those after rejection stand beside those before it."""
    after = {key.removeprefix(AFTER): number(value, missing) for key, value in values.items() if key.startswith(AFTER)}
    table = Table(box=box, pad_edge=False)
    table.add_column("audited", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    if after:
        table.add_column("kept tokens", justify="right", no_wrap=True)
    shows_over = width >= (_WIDE if after else 80)
    if shows_over:
        table.add_column("over", no_wrap=True)
    for key, value in values.items():
        if key.startswith(AFTER):
            continue
        over = report.denominators[key]
        cells = [after.get(key, "")] if after else []
        if shows_over:
            cells.append(f"{over['count']:,} {_SHORT.get(over['of'], over['of'])}")
        table.add_row(Text(key), number(value, missing), *cells)
    return table


def _worst_tokens(tokens: list[dict[str, Any]], box: Box, missing: str) -> Table:
    paths = {token["path"] for token in tokens}
    several = len(paths) > 1
    common = os.path.commonprefix([os.path.dirname(path) + "/" for path in paths if "/" in path]) if several else ""
    common = common[: common.rfind("/") + 1] if all(path.startswith(common) for path in paths) else ""
    table = Table(box=box, pad_edge=False)
    if several:
        table.add_column("worst tokens in", overflow="fold")
    for name in ("row" if several else "worst tokens: row", "position", "token id", "rollout", "train", "log ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for token in tokens:
        path = [Text(printable(token["path"].removeprefix(common)))] if several else []
        token_id = missing if token["token_id"] is None else str(token["token_id"])
        log_probs = [f"{token[key]:.4f}" for key in ("rollout_log_prob", "train_log_prob", "log_ratio")]
        table.add_row(*path, str(token["row"]), str(token["position"]), token_id, *log_probs)
    return table


def _id_differences(differences: dict[str, Any], box: Box) -> RenderableType:
    line = Text(
        f"token ids: {differences['differing_tokens']:,} of {differences['tokens']:,} differ, in "
        f"{differences['differing_sequences']:,} of {differences['sequences']:,} sequences"
    )
    if not differences["worst_sequences"]:
        return line
    table = Table(box=box, pad_edge=False)
    for name in ("row", "differing token ids", "first position"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in differences["worst_sequences"]:
        table.add_row(str(row["row"]), f"{row['differing']:,}", str(row["first_position"]))
    return Group(line, table)


def _finding(finding: Any) -> Text:
    text = Text()
    text.append(f"{finding.severity.upper()} {finding.code}", style=SEVERITY_STYLE[finding.severity])
    text.append(f": {finding.summary}")
    for place in finding.where[:5]:
        text.append("\n  where: " + printable(", ".join(f"{key} {value}" for key, value in place.items())))
    if finding.remedy:
        text.append(f"\n  do: {finding.remedy}")
    return text


def _reason(text: str, about: list[str], missing: str) -> str:
    more = f" and {len(about) - 3} more" if len(about) > 3 else ""
    return f"{missing} {', '.join(about[:3])}{more}: {text}"
