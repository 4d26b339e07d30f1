"""Which token belongs to which: a lag that all rows share or each has its own, rows and blocks exchanged.

A row is suspect when its sides are as far apart as if its tokens were paired at random. For each suspect the lag that
brings them together is looked for (by the cross-correlation, so that any lag costs the same), then another row, then
pieces of the row. All is decided on |d|, not on correlation alone: repetitive text correlates at many lags.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from rollout_audit.diagnosis.found import Found
from rollout_audit.diagnosis.view import Floats, Ints, View
from rollout_audit.report import Finding

_SHORTEST = 10
"""Tokens of a row below which its own lag cannot be told."""
_NEAR = 0.3
"""Suspect: |d| above this share of that of tokens paired at random."""
_BETTER = 0.5
"""Another pairing must bring |d| below this share of what it was."""
_CAP = 8.0
"""Nats that one token can count."""
_BLOCK = 16
_MOST_SUSPECTS = 400
_FINGERPRINT = 48


@dataclass
class _Row:
    """A row of the view, its sides apart."""

    number: int
    old: Floats
    rollout: Floats
    now: float
    """Mean |d| as the tokens are paired."""


def alignment(view: View) -> list[Found]:
    """The faults of pairing, each with the rows put right or left out."""
    suspects = _suspects(view)
    eligible = int((view.lengths >= _SHORTEST).sum())
    if not suspects or len(suspects) < max(1, 0.02 * eligible):
        return []
    found: list[Found] = []
    lags: dict[int, int] = {}
    for row in suspects[:_MOST_SUSPECTS]:
        if (lag := _best_lag(row)) is not None:
            lags[row.number] = lag
    blocks = {
        row.number: order
        for row in suspects[:_MOST_SUSPECTS]
        if (order := _blocks(row, lags.get(row.number))) is not None
    }
    for row in suspects[:_MOST_SUSPECTS]:
        if row.number in lags and row.number not in blocks and (order := _rotation(row, lags[row.number])) is not None:
            blocks[row.number] = order
    usual = Counter(lags.values()).most_common(1)
    for number in list(blocks):
        if usual and lags.get(number) == usual[0][0] and usual[0][1] >= 0.6 * len(lags) and _short(usual[0][0], view):
            del blocks[number]  # what a common shift pushed out at one end came back at the other
        else:
            lags.pop(number, None)
    if len(blocks) >= 0.2 * len(lags):
        # Where pieces are exchanged, a row of which one piece only could be placed is no row with a lag.
        lags = {number: lag for number, lag in lags.items() if abs(lag) < _BLOCK // 2}
    looked_at = min(len(suspects), _MOST_SUSPECTS)
    share = looked_at / len(suspects)
    common = Counter(lags.values()).most_common(1)
    if common and common[0][1] >= max(0.7 * eligible * share, 0.5 * looked_at) and common[0][0] != 0:
        found.append(_shifted(view, common[0][0], common[0][1], eligible))
        view = found[-1].left or view
        # What a common shift has put right is looked at again: rows may have been exchanged as well.
        return found + alignment(view) if len(found) == 1 else found
    partners = _partners(view, [row for row in suspects if row.number not in lags and row.number not in blocks])
    if len(partners) >= 2 and len(partners) >= len(lags) + len(blocks):
        lost = [
            r.number for r in suspects if r.number not in partners and r.number not in blocks and r.number not in lags
        ]
        found.append(_permuted(view, partners, _unlike(view, lost).size, eligible))
        view = found[-1].left or view
    if len(blocks) >= max(1, 0.02 * eligible) and _enough(len(blocks), eligible):
        found.append(_exchanged(view, blocks, eligible))
        view = found[-1].left or view
    if len(lags) >= max(1, 0.02 * eligible) and _enough(len(lags), eligible) and len(lags) > 0.2 * len(partners):
        found.append(_offset(view, lags, eligible))
        view = found[-1].left or view
    if found:  # what no pairing has helped in the same rows belongs to the same fault
        lost = [
            r.number for r in suspects if r.number not in partners and r.number not in blocks and r.number not in lags
        ]
        # Nor can it be told of short rows, where most of the others are wrong.
        moved = len(partners) + len(blocks) + len(lags)
        short = np.flatnonzero(view.lengths < _SHORTEST) if moved > 0.5 * eligible * share else np.array([], np.int64)
        found[-1].left = view.without_rows(np.concatenate([_unlike(view, lost), short]))
    else:
        unknown = [row.number for row in suspects if row.now > 0]
        if len(unknown) >= max(3, 0.5 * eligible) and _apart(view, unknown):
            found.append(_unrelated(view, unknown, eligible))
    return found


def _short(lag: int, view: View) -> bool:
    """Whether a lag is small against the rows."""
    return abs(lag) <= 0.25 * float(np.median(view.lengths[view.lengths >= _SHORTEST]))


def _enough(number: int, eligible: int) -> bool:
    return number >= 2 or eligible <= 4


def _baseline(old: Floats, rollout: Floats) -> float:
    """Mean |d| of tokens of this row paired at random: over several distances."""
    n = old.size
    steps = {max(1, n // 7), max(1, n // 3), max(1, n // 2), max(1, 2 * n // 3)}
    return float(np.mean([_distance(old, np.roll(rollout, step)) for step in steps]))


def _distance(x: Floats, y: Floats) -> float:
    return float(np.minimum(np.abs(x - y), _CAP).mean())


def _suspects(view: View) -> list[_Row]:
    """Rows whose tokens are no nearer than if paired at random."""
    result = []
    now = view.row_mean(np.minimum(view.size_of_d, _CAP))
    for number in np.flatnonzero((view.lengths >= _SHORTEST) & (now > 1e-6)):
        part = view.of_row(int(number))
        old, rollout = view.old[part], view.rollout[part]
        if now[number] > _NEAR * _baseline(old, rollout):
            result.append(_Row(int(number), old, rollout, float(now[number])))
    return result


def _correlations(old: Floats, rollout: Floats) -> Floats:
    """Cross-correlation for every lag k: old[t] with rollout[t + k]; index 0 is lag 0, -1 is lag -1."""
    size = 1 << (2 * old.size - 1).bit_length()
    clipped = [np.maximum(x, -12.0) for x in (old, rollout)]
    a, b = (np.fft.rfft(x - x.mean(), size) for x in clipped)
    result: Floats = np.fft.irfft(np.conj(a) * b, size)
    return result


def _at_lag(old: Floats, rollout: Floats, lag: int) -> tuple[Floats, Floats]:
    """Pairs old[t], rollout[t + lag]."""
    return (old[: old.size - lag], rollout[lag:]) if lag >= 0 else (old[-lag:], rollout[:lag])


def _best_lag(row: _Row) -> int | None:
    """The lag that brings the sides together; None where none does."""
    n = row.old.size
    correlation = _correlations(row.old, row.rollout)
    size = correlation.size
    order = np.argsort(-correlation)[:4]
    candidates = {int(i) if i < size // 2 else int(i) - size for i in order} | set(range(-4, 5))
    best, least = 0, row.now
    for lag in sorted(candidates, key=abs):
        if lag == 0 or n - abs(lag) < max(8, n // 4):
            continue
        old, rollout = _at_lag(row.old, row.rollout, lag)
        distance = _distance(old, rollout)
        if distance < least:
            best, least = lag, distance
    if best == 0 or not least < _BETTER * row.now:
        return None
    old, rollout = _at_lag(row.old, row.rollout, best)
    return best if _alike(old, rollout) else None


def _alike(x: Floats, y: Floats) -> bool:
    """Whether one side follows the other: ranks correlate."""
    if x.size < 6:
        return False
    first, second = (np.argsort(np.argsort(values)).astype(float) for values in (x, y))
    return float(np.corrcoef(first, second)[0, 1]) > 0.7


def _blocks(row: _Row, lag: int | None) -> Ints | None:
    """For each token of old, the rollout token that belongs to it, where pieces of the row have lags of their own."""
    n = row.old.size
    if n < 2 * _BLOCK:
        return None
    if lag is not None and n - abs(lag) > n - _BLOCK // 2:
        return None  # too little is left beside the lag for a second piece
    pieces = np.arange(0, n - _BLOCK + 1, _BLOCK)
    if pieces.size > 64:
        pieces = pieces[:: pieces.size // 64 + 1]
    windows = np.lib.stride_tricks.sliding_window_view(row.old, _BLOCK)
    lags: list[int | None] = []
    for first in pieces:
        piece = row.rollout[first : first + _BLOCK]
        distance = np.minimum(np.abs(windows - piece), _CAP).mean(1)
        at = int(np.argmin(distance))
        own = float(distance[first])
        near = float(np.median(distance))
        lags.append(int(first) - at if distance[at] < min(0.4 * near, 0.6 * own + 1e-12) else None)
        if own < 0.4 * near:
            lags[-1] = 0
    known = [k for k in lags if k is not None]
    counts = Counter(known)
    several = [k for k, count in counts.items() if count >= max(1, 0.1 * len(lags))]
    if len(known) < 0.5 * len(lags) or len(several) < 2 or all(k == 0 for k in several):
        return None
    if lag is not None and counts[lag] >= 0.85 * len(known):
        return None
    order = np.full(n, -1, dtype=np.int64)
    for k in several:
        token = np.arange(max(0, -k), min(n, n - k))
        if token.size < _BLOCK:
            continue
        distance = np.minimum(np.abs(row.old[token] - row.rollout[token + k]), _CAP)
        kernel = np.ones(7) / 7
        smooth = np.convolve(distance, kernel, "same")
        better = np.full(n, np.inf)
        better[token] = smooth
        current = _smooth_now(row, order)
        take = better < current
        order[take] = np.flatnonzero(take) + k
    apart = _smooth_now(row, order)
    order[apart > 4 * np.median(apart[order >= 0])] = -1  # where pieces meet
    moved = np.flatnonzero((order >= 0) & (order != np.arange(n)))
    if moved.size < _BLOCK // 2:
        return None
    # Of several pairings one is always nearest: it must be near, and the sides must follow each other.
    before, after = (_distance(row.old[moved], row.rollout[index]) for index in (moved, order[moved]))
    return order if after < 0.4 * before and _alike(row.old[moved], row.rollout[order[moved]]) else None


def _rotation(row: _Row, lag: int) -> Ints | None:
    """The order of a row whose two pieces stand the other way round; None where a lag is all there is."""
    n, k = row.old.size, abs(lag)
    if k < 8:
        return None
    # What has no partner at this lag: one end of old, the other end of rollout.
    old, rollout = (row.old[n - k :], row.rollout[:k]) if lag > 0 else (row.old[:k], row.rollout[n - k :])
    return (np.arange(n) + lag) % n if _distance(old, rollout) < _BETTER * row.now and _alike(old, rollout) else None


def _unlike(view: View, rows: list[int]) -> Ints:
    """Those rows whose sides are unlike each other."""
    result = [
        r for r in rows if view.lengths[r] < 6 or not _alike(view.old[view.of_row(r)], view.rollout[view.of_row(r)])
    ]
    return np.array(result, dtype=np.int64)


def _smooth_now(row: _Row, order: Ints) -> Floats:
    distance = np.where(order >= 0, np.minimum(np.abs(row.old - row.rollout[order]), _CAP), np.inf)
    filled = np.where(np.isfinite(distance), distance, _CAP)
    return np.where(np.isfinite(distance), np.convolve(filled, np.ones(7) / 7, "same"), np.inf)


def _partners(view: View, suspects: list[_Row]) -> dict[int, int]:
    """Row whose train side each suspect's rollout side belongs to."""
    lengths = view.lengths
    rows = np.flatnonzero(lengths >= 6)
    if not suspects or rows.size < 2:
        return {}
    width = _FINGERPRINT
    table = np.full((rows.size, width), np.nan)
    for i, number in enumerate(rows):
        values = view.old[view.of_row(int(number))][:width]
        table[i, : values.size] = np.maximum(values, -12.0)
    partners: dict[int, int] = {}
    for row in suspects[:_MOST_SUSPECTS]:
        mine = np.full(width, np.nan)
        mine[: min(width, row.rollout.size)] = np.maximum(row.rollout[:width], -12.0)
        both = np.isfinite(table) & np.isfinite(mine)
        counts = both.sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            distance = np.where(both, np.abs(table - mine), 0.0).sum(1) / counts
        distance[counts < 6] = np.inf
        own = float(distance[np.searchsorted(rows, row.number)])
        best = int(np.argmin(distance))
        if rows[best] == row.number or not distance[best] < 0.4 * own:
            continue
        m = int(counts[best])
        if _alike(table[best, :m], mine[:m]) and _stands_out(distance, best, m):
            partners[row.number] = int(rows[best])
    return partners


def _stands_out(distance: Floats, best: int, tokens: int) -> bool:
    """Few tokens fit some row by chance: the best must be far ahead of the rest, or long."""
    others = np.sort(distance[np.isfinite(distance)])
    usual = float(np.median(others))
    return bool(distance[best] < (0.5 if tokens >= 16 else 0.25) * usual)


def _apart(view: View, rows: list[int]) -> bool:
    """Whether the sides of these rows have nothing to do with each other, token by token."""
    correlations = []
    for number in rows[:100]:
        part = view.of_row(number)
        x, y = view.old[part], view.rollout[part]
        if x.size >= 16 and x.std() > 0 and y.std() > 0:
            correlations.append(float(np.corrcoef(np.maximum(x, -12), np.maximum(y, -12))[0, 1]))
    return len(correlations) >= 3 and float(np.median(correlations)) < 0.25


# Putting right


def _pairs(view: View, order: dict[int, Ints], rows: Ints | None = None) -> View:
    """A view in which old[t] of a row is paired with rollout[order[t]] of it; -1 leaves the token out."""
    rollout, kept = view.rollout.copy(), np.ones(view.size, dtype=bool)
    for number, index in order.items():
        part = view.of_row(number)
        if part.stop - part.start != index.size:
            continue  # what was put right before has changed this row
        kept[part] = index >= 0
        rollout[part] = view.rollout[part][index]
    return replace(view, rollout=rollout).keep(kept)


def _lagged(n: int, lag: int) -> Ints:
    index = np.arange(n) + lag
    return np.where((index >= 0) & (index < n), index, -1)


def _means(view: View, left: View) -> tuple[float, float]:
    return float(view.size_of_d.mean()), float(left.size_of_d.mean()) if left.size else float("nan")


def _shifted(view: View, lag: int, fits: int, eligible: int) -> Found:
    left = _pairs(view, {int(r): _lagged(int(view.lengths[r]), lag) for r in np.flatnonzero(view.lengths)})
    before, after = _means(view, left)
    direction = "later" if lag > 0 else "earlier"
    return Found(
        Finding(
            "shifted",
            "error",
            f"rollout_log_probs stand {abs(lag)} position{'s' * (abs(lag) > 1)} {direction} than old_log_probs in "
            f"{fits:,} of {eligible:,} rows: paired so, mean |log ratio| falls from {before:.4g} to {after:.4g}",
            {"lag": lag, "rows": fits, "rows_looked_at": eligible, "mean_abs_before": before, "mean_abs_after": after},
            [view.place(int(r)) for r in np.flatnonzero(view.lengths >= _SHORTEST)[:3]],
            "the log-prob of token t comes from logits[t - 1]: gather logits[:, :-1] at tokens[:, 1:] on both sides, "
            "and cut prompt and response at the same place",
        ),
        left,
    )


def _offset(view: View, lags: dict[int, int], eligible: int) -> Found:
    left = _pairs(view, {r: _lagged(int(view.lengths[r]), lag) for r, lag in lags.items()})
    before, after = _means(view, left)
    common = Counter(lags.values()).most_common(3)
    named = ", ".join(f"{lag:+d} in {count}" for lag, count in common)
    return Found(
        Finding(
            "row-offset",
            "error",
            f"{len(lags):,} of {eligible:,} rows are shifted, each by its own lag ({named} rows): paired so, mean "
            f"|log ratio| falls from {before:.4g} to {after:.4g}",
            {
                "rows": len(lags),
                "rows_looked_at": eligible,
                "lags": {str(lag): count for lag, count in common},
                "mean_abs_before": before,
                "mean_abs_after": after,
            },
            [view.place(r) | {"lag": lag} for r, lag in list(lags.items())[:5]],
            "a lag that varies by row is a prompt or padding length: cut responses by each row's own prompt length; "
            "check what packing and context parallelism put back",
        ),
        left,
    )


def _permuted(view: View, partners: dict[int, int], lost: int, eligible: int) -> Found:
    rollout, kept = view.rollout.copy(), np.ones(view.size, dtype=bool)
    back = {partner: row for row, partner in partners.items()}
    for number in set(partners) | set(back):
        part = view.of_row(number)
        source = back.get(number)
        if source is None:
            kept[part] = False
            continue
        values = view.rollout[view.of_row(source)]
        n = min(values.size, part.stop - part.start)
        rollout[part.start : part.start + n] = values[:n]
        kept[part.start + n : part.stop] = False
    left = replace(view, rollout=rollout).keep(kept)
    moved = np.isin(view.row, list(back))
    before = float(view.size_of_d[moved].mean())
    after = float(left.size_of_d[np.isin(left.row, list(back))].mean())  # where their own values now stand
    return Found(
        Finding(
            "rows-permuted",
            "error",
            f"rollout_log_probs of {len(partners) + lost:,} of {eligible:,} rows belong to other rows"
            + (f", {len(partners):,} of them to rows that are looked at" if lost else "")
            + f": put back, their mean |log ratio| falls from {before:.4g} to {after:.4g}",
            {
                "rows": len(partners) + lost,
                "partners_found": len(partners),
                "rows_looked_at": eligible,
                "mean_abs_before": before,
                "mean_abs_after": after,
            },
            [view.place(r) | {"belongs_to_row": view.places[p][1]} for r, p in list(partners.items())[:5]],
            "the two sides were put in another order: undo the sort by length, dynamic batch or data-parallel shuffle "
            "before dumping (verl: use_dynamic_bsz), or match rows by uid",
        ),
        left,
        silences=frozenset({"row-concentrated"}),
    )


def _exchanged(view: View, blocks: dict[int, Ints], eligible: int) -> Found:
    left = _pairs(view, blocks)
    before, after = _means(view, left)
    return Found(
        Finding(
            "blocks-permuted",
            "error",
            f"pieces within {len(blocks):,} of {eligible:,} rows are exchanged: put back, mean |log ratio| falls from "
            f"{before:.4g} to {after:.4g}",
            {"rows": len(blocks), "rows_looked_at": eligible, "mean_abs_before": before, "mean_abs_after": after},
            [view.place(r) for r in list(blocks)[:5]],
            "context parallelism hands each rank pieces of a sequence (zig-zag): gather them in order; check "
            "cp_partition_mode, cu_seqlens and what packing undoes",
        ),
        left,
        silences=frozenset({"sparse-outliers"}),  # tokens where pieces meet may be put wrong
    )


def _unrelated(view: View, rows: list[int], eligible: int) -> Found:
    left = view.without_rows(np.array(rows))
    return Found(
        Finding(
            "rows-permuted",
            "error",
            f"in {len(rows):,} of {eligible:,} rows the two sides have nothing to do with each other, at no lag"
            + ("" if view.whole else f"; the rows they belong to are not among the {len(view.places):,} looked at"),
            {"rows": len(rows), "rows_looked_at": eligible, "partners_found": 0},
            [view.place(r) for r in rows[:5]],
            "check that both tensors are of the same rows in the same order, and of the same tokens",
        ),
        left,
        explains=float(view.size_of_d[np.isin(view.row, rows)].sum() / view.size_of_d.sum()),
    )
