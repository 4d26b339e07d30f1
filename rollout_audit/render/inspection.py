"""Tables of `inspect`: one file after the other."""

from __future__ import annotations

from typing import Any

from rich.box import Box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollout_audit.errors import printable
from rollout_audit.render.tables import box_for, dash, gate_lines, number
from rollout_audit.report import Report


def to_tables(report: Report, encoding: str = "utf-8") -> RenderableType:
    """What is in each file. Names and metadata are never read as markup."""
    box, missing = box_for(encoding), dash(encoding)
    parts = [part for file in report.inputs for part in _file(file, box, missing)]
    return Group(*parts, *gate_lines(report))


def _file(file: dict[str, Any], box: Box, missing: str) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(printable(file["path"]), style="bold")]
    table = Table(box=box, pad_edge=False)
    for name in ("tensor", "dtype", "shape", "is", "why"):
        table.add_column(name, no_wrap=name != "why", overflow="fold")
    for tensor in file["tensors"]:
        shape = " x ".join(str(n) for n in tensor["shape"])
        table.add_row(
            Text(printable(tensor["name"])), tensor["dtype"], shape, tensor["canonical"] or missing, tensor["why"] or ""
        )
    parts.append(table)
    if file["metadata"]:
        pairs = ", ".join(f"{key}={value}" for key, value in sorted(file["metadata"].items()))
        parts.append(Text(f"header: {printable(pairs)}"))
    rows = file["rows"]
    if rows:
        parts.append(Text(_rows(rows, missing)))
        parts += [Text(_values(name, values, missing)) for name, values in rows["values"].items()]
    parts += [Text(f"{command}: {printable(answer)}") for command, answer in file["commands"].items()]
    parts += [Text(f"note: {printable(note)}", style="yellow") for note in file["notes"]]
    parts.append(Text(""))
    return parts


def _rows(rows: dict[str, Any], missing: str) -> str:
    mask = printable(rows["mask"] or "no mask: all tokens counted")
    lengths = " / ".join(number(rows[key], missing) for key in ("length_min", "length_median", "length_max"))
    return (
        f"rows: {rows['sequences']:,} sequences of {rows['width']:,}, {rows['empty_sequences']:,} empty; mask: {mask}\n"
        f"lengths (min / median / max): {lengths}; padding: {', '.join(rows['padding'])}; "
        f"{rows['valid_tokens']:,} valid tokens"
    )


def _values(name: str, values: dict[str, Any], missing: str) -> str:
    text = f"{name}: {number(values['min'], missing)} to {number(values['max'], missing)}"
    if values["nonfinite_valid"] or values["nonfinite_padding"]:
        text += f"; NaN or infinite: {values['nonfinite_valid']:,} valid, {values['nonfinite_padding']:,} in padding"
    if values["repeated_values"]:
        common = ", ".join(f"{value} {count:,} times" for value, count in values["repeated_values"].items())
        text += f"; recurring values: {common}"
    return text
