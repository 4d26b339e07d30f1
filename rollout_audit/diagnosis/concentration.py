"""Where the difference sits: in first tokens, after a point of the row, late in the row, in few rows, in few tokens.

Unlikely tokens differ more, in health too, and likelihood varies along a row: so |d| is compared at equal probability,
each token's |d| divided by what its probability lets expect.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rollout_audit.diagnosis.found import Found
from rollout_audit.diagnosis.view import Bools, Floats, Ints, View
from rollout_audit.report import Finding

_LEAST_TOKENS = 200


def turn_start(view: View, bad: float) -> Found | None:
    """|d| large at the first tokens of a response or turn, and soon no more."""
    rows = np.flatnonzero(view.lengths >= 24)
    if rows.size < 6 or view.size < _LEAST_TOKENS:
        return None
    since = _since_start(view)
    inside = np.isin(view.row, rows)
    size = np.minimum(view.size_of_d, 5.0)
    first, second, later = (inside & (since < 2), inside & (since >= 6) & (since < 16), inside & (since >= 20))
    if min(first.sum(), later.sum()) < 12:
        return None
    scaled = view.relative_to(later)
    (high, se_high), (rest, _) = view.mean(scaled, first), view.mean(scaled, later)
    at, plain = float(size[first].mean()), float(size[later].mean())
    middle = float(scaled[second].mean()) if second.any() else rest
    if not (high - 4 * se_high > 3 * rest and at > max(0.1, 2 * bad) and at > 4 * plain and middle < 0.7 * high):
        return None
    reach = _reach(scaled, since, inside, rest)
    hit = inside & (since < reach)
    return Found(
        Finding(
            "turn-start",
            "error",
            f"mean |log ratio| is {at:.3g} at the first two tokens of a response or turn and {plain:.3g} from the 20th "
            f"on, {high / rest:.0f} times as much at equal probability; it settles within {reach} tokens",
            {
                "mean_abs_first": at,
                "mean_abs_later": plain,
                "relative_first": high,
                "standard_error": se_high,
                "settles_within": reach,
            },
            [view.place(int(view.row[i]), int(i)) for i in _largest(view, first)],
            "the two sides see other tokens before the response: hand prompt token ids over as they are, do not "
            "render and tokenise the chat template twice",
        ),
        view.keep(~hit),
        silences=frozenset(
            {"version-switch", "position-growth", "row-concentrated", "sparse-outliers", "different-weights"}
        ),
    )


def _since_start(view: View) -> Ints:
    """Tokens since the response, or a turn after masked tokens, began."""
    new_row = np.r_[True, view.row[1:] != view.row[:-1]]
    # A hole of one or two columns is a token that was left out, not a turn.
    new = new_row | np.r_[True, np.diff(view.column) > 2]
    starts = np.flatnonzero(new)
    since = np.arange(view.size) - np.repeat(starts, np.diff(np.r_[starts, view.size]))
    return since.astype(np.int64)


def _reach(scaled: Floats, since: Ints, inside: Bools, rest: float) -> int:
    for reach in (2, 4, 8, 16, 32, 64):
        near = inside & (since >= reach) & (since < 2 * reach)
        if near.any() and scaled[near].mean() < 1.7 * rest:
            return reach
    return 64


def version_switch(view: View, bad: float) -> Found | None:
    """A change-point inside rows: |d| of one size before it and of another after it."""
    rows = np.flatnonzero(view.lengths >= 32)
    if rows.size < 4:
        return None
    scaled = view.relative
    size = np.minimum(view.size_of_d, 5.0)
    points: dict[int, tuple[int, float, float]] = {}
    for number in rows.tolist():
        part = view.of_row(number)
        split = _change_point(scaled[part])
        if split is None:
            continue
        low, high = sorted((size[part][:split].mean(), size[part][split:].mean()))
        if high > 3 * max(low, 1e-6) and high > bad:
            points[number] = (split, float(size[part][:split].mean()), float(size[part][split:].mean()))
    if len(points) < max(3, 0.2 * rows.size):
        return None
    early = sum(before > after for _, before, after in points.values())
    if max(early, len(points) - early) < 0.8 * len(points):
        return None
    splits = np.array([split for split, _, _ in points.values()])
    before, after = (float(np.mean([p[i] for p in points.values()])) for i in (1, 2))
    if np.median(splits) < 12 and before > after:
        return None
    high = np.zeros(view.size, dtype=bool)
    for number, (split, x, y) in points.items():
        part = view.of_row(number)
        high[part.start : part.start + split] = x > y
        high[part.start + split : part.stop] = y > x
    common = float((np.abs(splits - np.median(splits)) <= 2).mean())
    at = f"at token {int(np.median(splits))} of each" if common > 0.7 else "at various tokens"
    return Found(
        Finding(
            "version-switch",
            "warning",
            f"{len(points):,} of {rows.size:,} rows change inside, {at}: mean |log ratio| {before:.3g} before and "
            f"{after:.3g} after, as when weights are updated while a response is generated",
            {
                "rows": len(points),
                "rows_looked_at": int(rows.size),
                "median_position": float(np.median(splits)),
                "mean_abs_before": before,
                "mean_abs_after": after,
                "share_at_one_position": common,
            },
            [view.place(r) | {"token": s} for r, (s, _, _) in list(points.items())[:5]],
            "finish or restart responses at a weight update, or mask the tokens of old versions and correct them with "
            "importance weights by version",
        ),
        view.keep(~high),
        # The versions differ, and rows that changed late or early differ more than others.
        silences=frozenset({"row-concentrated", "sparse-outliers", "different-weights"}),
    )


def _change_point(values: Floats) -> int | None:
    """Where the log of the values steps most; None where chance would do."""
    n = values.size
    x = np.log(np.maximum(values, 1e-3))
    edge = max(6, n // 20)
    total, square = np.cumsum(x), np.cumsum(x * x)
    k = np.arange(edge, n - edge)
    if k.size < 4:
        return None
    left, right = total[k - 1] / k, (total[-1] - total[k - 1]) / (n - k)
    within = square[-1] - k * left**2 - (n - k) * right**2
    gain = (left - right) * np.sqrt(k * (n - k) / n)
    statistic = np.abs(gain) / np.sqrt(np.maximum(within, 1e-12) / max(1, n - 2))
    best = int(np.argmax(statistic))
    # The largest of many correlated t values: about 3.2 by chance for these lengths.
    return int(k[best]) if statistic[best] > _critical(n) and abs(left[best] - right[best]) > 0.8 else None


@lru_cache
def _critical(n: int) -> float:
    return 4.0 + 0.25 * float(np.log10(n))


def position_growth(view: View, bad: float) -> Found | None:
    """|d| grows along the row, at equal probability and within the same rows."""
    rows = np.flatnonzero(view.lengths >= 32)
    if rows.size < 4 or view.size < 500:
        return None
    inside = np.isin(view.row, rows)
    part = view.keep(inside)
    scaled = part.relative
    share = part.index / np.maximum(1, part.lengths[part.row] - 1)
    fifth = np.minimum((share * 5).astype(int), 4)
    means = [part.mean(scaled, fifth == number) for number in range(5)]
    (first, se_first), (last, se_last) = means[0], means[4]
    size = np.minimum(part.size_of_d, 5.0)
    early, late = float(size[fifth == 0].mean()), float(size[fifth == 4].mean())
    if _steps_rather(part, scaled):
        return None
    rising = all(b > 0.93 * a for (a, _), (b, _) in zip(means, means[1:], strict=False))
    if not (last - 3 * se_last > 1.8 * (first + 3 * se_first) and rising and late > bad * 0.8 and late > 2 * early):
        return None
    explained = float((size.sum() - early * size.size) / size.sum())
    return Found(
        Finding(
            "position-growth",
            "error",
            f"mean |log ratio| grows along the row, from {early:.3g} in the first fifth to {late:.3g} in the last, "
            f"{last / first:.1f} times at equal probability, within the same rows",
            {
                "mean_abs_by_fifth": {str(i + 1): float(size[fifth == i].mean()) for i in range(5)},
                "relative_by_fifth": {str(i + 1): mean for i, (mean, _) in enumerate(means)},
                "rows": int(rows.size),
            },
            remedy="compare rope_theta, rope scaling (yarn), sliding window and maximum length on both sides; a "
            "recurrent or prefix cache that is not refreshed grows so too",
        ),
        explains=max(0.0, explained),
        silences=frozenset({"different-weights", "length-amplified", "row-concentrated", "version-switch"}),
    )


def _steps_rather(view: View, scaled: Floats) -> bool:
    """Whether rows change at a point rather than gradually: the better fit to log |d|, counted over rows."""
    votes = []
    for number in np.flatnonzero(view.lengths >= 48):
        x = np.log(np.maximum(scaled[view.of_row(int(number))], 1e-3))
        t = np.linspace(-1, 1, x.size)
        split = _change_point(scaled[view.of_row(int(number))])
        if split is None:
            continue
        step = np.where(np.arange(x.size) < split, x[:split].mean(), x[split:].mean())
        # Both a straight line and a curve that bends once: a step must beat what grows gradually.
        line = np.polyval(np.polyfit(t, x, 2), t)
        votes.append(((x - step) ** 2).sum() < ((x - line) ** 2).sum())
    return len(votes) >= 3 and float(np.mean(votes)) > 0.65


def row_concentrated(view: View, bad: float) -> Found | None:
    """Few rows hold most of the difference, the others are healthy."""
    rows = np.flatnonzero(view.lengths >= 12)
    if rows.size < 10:
        return None
    means = view.row_mean(view.relative)[rows]
    plain = view.row_mean(np.minimum(view.size_of_d, 5.0))[rows]
    usual = float(np.median(plain))
    high = (plain > 4 * usual) & (means > 2.0) & (plain > bad)
    order = np.sort(plain)
    share = float(high.mean())
    if not (high.sum() >= 2 and share <= 0.4):
        return None
    # Two groups, not one with a long tail: a gap between them.
    gap = plain[high].min() / max(1e-9, order[order < plain[high].min()].max(initial=1e-9))
    chosen = rows[high]
    hit = np.isin(view.row, chosen)
    held = float(view.size_of_d[hit].sum() / view.size_of_d.sum())
    if not (held > 0.35 and (gap > 1.3 or held > 0.6) and held > 3 * float(hit.mean())):
        return None
    worst = view.worst_rows(np.where(np.isin(np.arange(len(view.places)), chosen), view.row_mean(view.size_of_d), 0.0))
    return Found(
        Finding(
            "row-concentrated",
            "warning",
            f"{chosen.size:,} of {rows.size:,} rows hold {held:.0%} of the difference: mean |log ratio| "
            f"{view.size_of_d[hit].mean():.3g} there and {view.size_of_d[~hit].mean():.3g} elsewhere",
            {
                "rows": int(chosen.size),
                "rows_looked_at": int(rows.size),
                "share_of_difference": held,
                "mean_abs_there": float(view.size_of_d[hit].mean()),
                "mean_abs_elsewhere": float(view.size_of_d[~hit].mean()),
            },
            [view.place(r) for r in worst],
            "look at what these rows share (prompt, image, tool, worker, time); drop them until it is found: NeMo RL "
            "seq_logprob_error_threshold, verl rollout_rs=seq_mean_k3",
        ),
        view.keep(~hit),
        silences=frozenset({"sparse-outliers"}),
    )


def sparse_outliers(view: View, bad: float) -> Found | None:
    """Isolated tokens far off over a healthy bulk."""
    if view.size < 500:
        return None
    limit = max(np.log(2), 15 * view.typical)
    hit = view.size_of_d > limit
    number, share = int(hit.sum()), float(hit.mean())
    bulk = float(view.size_of_d[~hit].mean())
    if number < 3 or not 0.0025 < share < 0.08 or bulk > bad:
        return None
    held = float(view.size_of_d[hit].sum() / view.size_of_d.sum())
    # Alone: the tokens beside them are hit no more often than chance has it.
    beside = np.r_[hit[1:], False] & np.r_[view.row[1:] == view.row[:-1], False]
    runs = float((hit & beside).sum() / number)
    if held < 0.25 or runs > 0.25 + 3 * share or _unlikely_only(view, hit):
        return None
    return Found(
        Finding(
            "sparse-outliers",
            "warning",
            f"{number:,} of {view.size:,} tokens ({share:.2%}) are more than {limit:.2g} nats off, alone among healthy "
            f"ones (mean |log ratio| {bulk:.3g} without them), and hold {held:.0%} of the difference",
            {
                "tokens": number,
                "share": share,
                "limit": float(limit),
                "mean_abs_without": bulk,
                "share_of_difference": held,
                "share_in_runs": runs,
            },
            [view.place(int(view.row[i]), int(i)) for i in _largest(view, hit)],
            "in a mixture of experts these are tokens routed to other experts: replay the rollout's routing (R3), "
            "or cut them with token-level truncation or IcePop",
        ),
        view.keep(~hit),
    )


def _unlikely_only(view: View, hit: Bools) -> bool:
    """Whether they are just the unlikeliest tokens, where any mismatch is largest."""
    floor = np.quantile(view.rollout, 0.03)
    return float((view.rollout[hit] <= floor).mean()) > 0.8


def _largest(view: View, where: Bools, number: int = 5) -> list[int]:
    chosen = np.flatnonzero(where)
    return [int(i) for i in chosen[np.argsort(-view.size_of_d[chosen], kind="stable")[:number]]]
