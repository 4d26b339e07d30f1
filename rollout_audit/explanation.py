"""`explain`: what METRICS.md says of a metric or a finding. The page is the one text; nothing is written twice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from rollout_audit.errors import AuditError

_HERE = Path(__file__).parent


def page() -> str:
    """METRICS.md: beside this file where it was installed, above it in a checkout."""
    for path in (_HERE / "METRICS.md", _HERE.parent / "METRICS.md"):
        if path.exists():
            return path.read_text(encoding="utf-8")
    raise AuditError("METRICS.md is not here", path=str(_HERE), do="install the package again")


def names() -> list[str]:
    """Every name that can be explained: findings, then keys (patterns with {braces})."""
    text = page()
    return [*_findings(text), *(key for key, _ in _rows(text, "key"))]


def explain(name: str) -> str:
    """The explanation of a finding's code, or of a metric by its full key or last part, in plain text.

    Raises AuditError for a name that is neither, with names that are near.
    """
    text = page()
    if (finding := _findings(text).get(name)) is not None:
        return _plain(f"{name}\n\n{finding}")
    found = [(key, cells) for key, cells in _rows(text, "key") if _is(name, key)]
    if not found:
        short = {known.rsplit("/", 1)[-1]: known for known in names()}
        close = difflib.get_close_matches(name.rsplit("/", 1)[-1], short, 4)
        raise AuditError(
            f"nothing is called {name}",
            wanted="a finding or a metric",
            found=f"near it: {', '.join(close)}" if close else None,
            do="`rollout-audit explain` lists all names",
        )
    exact = [item for item in found if "{" not in item[0]]
    return _plain("\n\n".join(_metric(text, *_of_rule(text, name, *item)) for item in exact or found[:1]))


def _of_rule(text: str, name: str, key: str, cells: list[str]) -> tuple[str, list[str]]:
    """A rejection rule's statistic has its row in a table of its own: the one whose name ends this name."""
    if "{statistic}" not in key:
        return key, cells
    rows = [(word, row) for word, row in _rows(text, "statistic") if name.endswith(f"_{word}")]
    if not rows:
        return key, cells
    _, row = max(rows, key=lambda item: len(item[0]))
    return name, row[:4]


def _metric(text: str, key: str, cells: list[str]) -> str:
    meaning, formula, unit, over = cells
    lines = [key, "", meaning, "", f"formula: {formula}", f"unit:    {unit}", f"over:    {over}"]
    for known, row in _rows(text, "our key"):
        if known.rsplit("/", 1)[-1] == key.rsplit("/", 1)[-1]:
            lines.append(f"normal:  {row[0]} ({row[1]})" if len(row) == 2 else f"named elsewhere: {row[0]}")
    return "\n".join(lines)


def _is(name: str, key: str) -> bool:
    """Whether a name, full or its last part, is this key; a part of the key in braces stands for any word."""
    pattern = re.sub(r"\\\{\w+\\\}", "[a-z0-9_]+", re.escape(key))
    return re.fullmatch(pattern, name) is not None or re.fullmatch(pattern.rsplit("/", 1)[-1], name) is not None


def _findings(text: str) -> dict[str, str]:
    section = text[text.index("\n## Findings") : text.index("\n## Settings")]
    result = {}
    for part in section.split("\n### ")[1:]:
        head, _, body = part.partition("\n")
        result[head.strip("` ")] = body.strip()
    return result


def _rows(text: str, header: str) -> Iterator[tuple[str, list[str]]]:
    """First cell, without its backticks, and the others, of all tables with this first header."""
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[0] == header:
            inside = True
        elif inside and not set(line) <= set("|- "):
            yield cells[0].strip("`"), cells[1:]


def _plain(markdown: str) -> str:
    """Without backticks and links, as a terminal shows it."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", markdown).replace("`", "")
