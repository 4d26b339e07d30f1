"""Values that are no log-probs: another quantity in the tensor, a filler on some tokens, a coarse grid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rollout_audit.diagnosis.found import Found
from rollout_audit.diagnosis.view import Bools, Floats, View
from rollout_audit.report import Finding

_SIDES = {"rollout": "rollout_log_probs", "old": "old_log_probs"}
_LEAST_TOKENS = 20
_FAR = 0.05
"""Nats between a filler and the other side below which nobody is hurt, and confident tokens look alike."""
_SCATTERED = 1e-3
"""Share of tokens below which zeros that are not the rows' last tokens may be values cut at 0."""
_SENTINEL = 50.0
"""No log-prob of a sampled token is this far from 0; one such value is enough."""


def not_log_probs(view: View) -> Found | None:
    """Probabilities, negated values or another base: the reading under which both sides agree."""
    if view.size < _LEAST_TOKENS:
        return None
    before = float(view.size_of_d.mean())
    for side, other in (("rollout", "old"), ("old", "rollout")):
        x, y = getattr(view, side), getattr(view, other)
        if before < 0.1 * float(np.abs(y).mean()):
            continue  # any such reading would differ by more
        for name, read in _readings(x, y).items():
            after = float(np.abs(read - y).mean())
            if not after < 0.3 * before:
                continue
            finding = Finding(
                "not-log-probs",
                "error",
                f"{_SIDES[side]} holds {name}: read so, mean |log ratio| falls from {before:.4g} to {after:.4g}",
                {"field": _SIDES[side], "holds": name, "mean_abs_before": before, "mean_abs_after": after},
                remedy="dump natural log-probs of the sampled tokens, log_softmax(logits)[token], on both sides",
            )
            parts: dict[str, Any] = {side: read}
            left = View(**{**{f: getattr(view, f) for f in view.__dataclass_fields__}, **parts})
            return Found(finding, left, silences=frozenset({"positive-log-prob"}))
    return None


def _readings(x: Floats, y: Floats) -> dict[str, Floats]:
    """How else these numbers could be meant, where they can be at all."""
    if (x >= 0).mean() > 0.98 and (y <= 0).mean() > 0.9:
        if x.max() <= 1 and (x < 1).mean() > 0.02:
            return {"probabilities": np.log(np.maximum(x, 1e-45))}
        return {"negated log-probs": -x}
    result = {}
    for base, name in ((2.0, "base-2 logarithms"), (10.0, "base-10 logarithms")):
        read = x * math.log(base)
        far = np.abs(y) > 0.5
        # Beyond noise, the one must be the multiple of the other, token by token.
        if far.sum() >= _LEAST_TOKENS and abs(np.median(read[far] / y[far]) - 1) < 0.03:
            result[name] = read
    return result


def filler(view: View) -> Found | None:
    """A constant on valid tokens that stands for a log-prob nobody had."""
    hit = np.zeros(view.size, dtype=bool)
    found: list[tuple[str, float, int]] = []
    for side, other in (("rollout", "old"), ("old", "rollout")):
        x, y = getattr(view, side), getattr(view, other)
        for value in _repeated(x):
            here = _filled(view, x, y, value)
            if here is not None:
                hit |= here
                found.append((_SIDES[side], value, int(here.sum())))
    if not found:
        return None
    found.sort(key=lambda item: -item[2])
    number, rows = int(hit.sum()), np.unique(view.row[hit]).size
    last = _on_last(view, hit)
    where = [view.place(int(view.row[i]), int(i)) for i in np.flatnonzero(hit)[:5]]
    shape = (
        f"{last:.0%} of them the last token of their row"
        if last > 0.8
        else f"in {_spans(view, hit):,} spans of {number / max(1, _spans(view, hit)):.1f} tokens"
    )
    values = "; ".join(f"{value:g} in {name} {count:,} times" for name, value, count in found[:4])
    finding = Finding(
        "filler",
        "error",
        f"{number:,} of {view.size:,} valid tokens ({number / view.size:.2%}) hold a constant in place of a log-prob: "
        f"{values}; {shape}",
        {
            "tokens": number,
            "looked_at": view.size,
            "rows": rows,
            "values": {f"{name} {value:g}": count for name, value, count in found},
            "share_on_last_token": last,
            "share_at_ends": _at_ends(view, hit, np.isin(view.rollout, [value for _, value, _ in found])),
        },
        where,
        "set the mask to 0 there, or store the log-prob of the token that was sampled (the end token's too)",
    )
    return Found(finding, view.keep(~hit), silences=frozenset({"positive-log-prob"}))


def _repeated(x: Floats) -> list[float]:
    """Values that could be fillers: those that no log-prob has, 0, and those that repeat more than chance allows."""
    values, counts = np.unique(x, return_counts=True)
    usual = max(8, 3e-4 * x.size, 3 * float(np.median(counts)))
    chosen = (counts >= usual) | (np.abs(values) > _SENTINEL) | np.isin(values, (0.0, 1.0, -1.0))
    order = np.argsort(-counts[chosen], kind="stable")[:20]
    return [float(value) for value in values[chosen][order]]


def _filled(view: View, x: Floats, y: Floats, value: float) -> Bools | None:
    """Tokens where `value` is a filler; None where it may be a log-prob."""
    at: Bools = x == value
    far = at & (np.abs(y - x) > max(_FAR, 4 * view.typical))
    number, count = int(far.sum()), int(at.sum())
    if not number:
        return None
    if abs(value) > _SENTINEL or value == 1.0:
        return at
    others = np.abs(y - x)[~at]
    usual = float((others > max(_FAR, 4 * view.typical)).mean()) if others.size else 0.0
    # As far from the other side as elsewhere: a value like any other, of a batch whose sides are far apart.
    share = number / count
    if value == 0.0:
        if _on_last(view, at) > 0.7 and count > 0.8 * view.filled and float(np.median(np.abs(y[at]))) > _FAR:
            return at  # an end token that was never scored, also where it happens to be likely
        # Confident tokens are 0 on both sides, to rounding: only those far away are fillers.
        close = float((np.abs(y) <= _FAR).mean())
        if number < 2 and not (view.filled < 30 and _on_last(view, far) == 1.0 and share > 0.5):
            return None
        if number < _SCATTERED * view.size and _on_last(view, far) < 0.8:
            return None
        # A filler does not care for the other side; values cut at 0 were near it.
        beyond = np.abs(y) > max(_FAR, 4 * view.typical)
        if _on_last(view, far) < 0.8 and np.median(np.abs(y[far])) < 0.5 * np.median(np.abs(y[beyond])):
            return None
        by_chance = close + (1 - close) * usual
        return at & (np.abs(y) > 1e-3) if share > max(0.5, by_chance) else far if share > 2 * usual + 0.01 else None
    # The same token after the same beginning has the same log-prob again and again: a filler does not care for tokens.
    ids = np.unique(view.ids[at])
    if ids.size <= 2 and (ids >= 0).all():
        return None
    return at if number >= 3 and share > max(0.6, 2 * usual) else None


def _on_last(view: View, hit: Bools) -> float:
    ends = view.starts + view.lengths - 1
    return float(np.isin(np.flatnonzero(hit), ends).mean()) if hit.any() else 0.0


def _at_ends(view: View, hit: Bools, same: Bools) -> float:
    """Share of the hits in runs of the same values that begin or end a row."""
    other = np.flatnonzero(~same)
    first, last = np.full(len(view.places), view.size), np.full(len(view.places), -1)
    np.minimum.at(first, view.row[other], other)
    np.maximum.at(last, view.row[other], other)
    at = np.flatnonzero(hit)
    return float(((at < first[view.row[at]]) | (at > last[view.row[at]])).mean()) if at.size else 0.0


def _spans(view: View, hit: Bools) -> int:
    follows = np.r_[False, (view.row[1:] == view.row[:-1]) & hit[:-1]]
    return int((hit & ~follows).sum())


def coarse_grid(view: View) -> Found | None:
    """Values that bf16 or fp16 can hold exactly, although most log-probs cannot be."""
    if view.size < 200:
        return None
    for side, name in _SIDES.items():
        x = getattr(view, side)
        large = np.abs(x[np.abs(x) > 1e-3])
        if large.size < 100:
            continue
        mantissa, exponent = np.frexp(large)
        for kind, bits in (("bf16", 8), ("fp16", 11)):
            if (np.ldexp(mantissa, bits) % 1 == 0).mean() > 0.99:
                floor = float(np.ldexp(1.0, exponent - bits).mean() / 4)
                return Found(
                    Finding(
                        "coarse-grid",
                        "info",
                        f"{name} is stored on the grid of {kind}: rounding alone makes mean |log ratio| about "
                        f"{floor:.2g} (it is {view.size_of_d.mean():.2g})",
                        {"field": name, "grid": kind, "floor": floor},
                        remedy="take log_softmax in float32 and store float32",
                    ),
                    view,
                )
    return None
