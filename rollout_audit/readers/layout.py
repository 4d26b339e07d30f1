"""How a run lays out its files: which training step and rank a path names, and which step is not whole.

Known: step_7, global_step_7, iter_0000007, rollout_7 as a step; rank_3, dp_3, shard_3, 00003-of-00008 as a rank; in
folder or file names, with _ or - or nothing before the number.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_STEP = re.compile(r"(?:^|[/_.-])(?:global_?)?(?:step|iter|iteration|rollout)[_-]?(\d+)", re.IGNORECASE)
_RANK = re.compile(r"(?:^|[/_.-])(?:rank|dp|shard)[_-]?(\d+)", re.IGNORECASE)
_OF = re.compile(r"(?:^|[/_.-])(\d+)-of-(\d+)", re.IGNORECASE)
MARKERS = ("STABLE", "_SUCCESS", "SUCCESS", "DONE", ".done", ".complete")
"""Files that frameworks put beside a step's files when all are written."""


@dataclass(frozen=True)
class Place:
    """Step and rank that a path names; None where it names none."""

    step: int | None
    rank: int | None
    world: int | None


def place_of(path: str) -> Place:
    """The last step and rank in the path: file names win over folders."""
    path = path.replace(os.sep, "/")
    steps, ranks, shards = _STEP.findall(path), _RANK.findall(path), _OF.findall(path)
    if shards:
        return Place(int(steps[-1]) if steps else None, int(shards[-1][0]), int(shards[-1][1]))
    return Place(int(steps[-1]) if steps else None, int(ranks[-1]) if ranks else None, None)


def by_step(paths: Iterable[str]) -> dict[int | None, list[str]]:
    """Paths of each step, steps in order; None for those that name none."""
    steps: dict[int | None, list[str]] = defaultdict(list)
    for path in paths:
        steps[place_of(path).step].append(path)
    return dict(sorted(steps.items(), key=lambda item: -1 if item[0] is None else item[0]))


def incomplete(paths: Iterable[str]) -> list[str]:
    """What is missing, over all steps."""
    return [sentence for sentences in incomplete_steps(paths).values() for sentence in sentences]


def incomplete_steps(paths: Iterable[str]) -> dict[int | None, list[str]]:
    """What each step lacks, in sentences: a rank that other steps have, a gap in the ranks, a marker file.

    Counting from 0 or 1 is taken from the files themselves; nothing is said where paths name no ranks, or where they
    name so few of them that somebody must have picked them.
    """
    steps = by_step(paths)
    ranks = {step: {place_of(path).rank for path in inside} - {None} for step, inside in steps.items()}
    everywhere = {rank for step in ranks for rank in ranks[step] if rank is not None}
    lowest = min(everywhere, default=0)
    worlds = [place_of(path).world for inside in steps.values() for path in inside]
    if None not in worlds and worlds:
        expected = set(range(lowest, lowest + max(world for world in worlds if world is not None)))
    else:
        expected = set(range(lowest, max(everywhere, default=-1) + 1))
        if 2 * len(everywhere) < len(expected):
            expected = everywhere  # a few files picked by hand, not a step with gaps
    marked = {step: _markers(inside) for step, inside in steps.items()}
    usual = set().union(*marked.values()) if marked else set()
    result: dict[int | None, list[str]] = {step: [] for step in steps}
    for step, inside in steps.items():
        name = "the batch" if step is None else f"step {step}"
        if missing := sorted(expected - ranks[step]):
            shown = ", ".join(str(rank) for rank in missing[:5]) + (", ..." if len(missing) > 5 else "")
            result[step].append(f"{name}: no file of rank {shown} ({len(ranks[step])} of {len(expected)} ranks)")
        if usual and not marked[step]:
            result[step].append(f"{name}: no {' or '.join(sorted(usual))} beside {inside[0]}, which other steps have")
    return result


def _markers(paths: Iterable[str]) -> set[str]:
    folders = {os.path.dirname(path) or "." for path in paths}
    return {name for folder in folders for name in MARKERS if os.path.exists(os.path.join(folder, name))}
