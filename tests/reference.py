"""Every number of is-metrics and debug-compare, the slow way: loops over Python lists, one formula a line.

Nothing of the package is used here, and no tensor. The formulas are those of verl 0.9.1 (`verl_*`, from reading
verl/trainer/ppo/rollout_corr_helper.py and verl/utils/debug/metrics.py) and of METRICS.md (`audited_*`).
Sums are exactly rounded (math.fsum); spreads and k3, in which digits cancel, are taken with 60 digits: the round-off
that a test sees is the package's alone.

A batch is a list of sequences, each the list of its valid tokens (`valid` selects them); an empty sequence is `[]`.
The names of METRICS.md hold: p train, r rollout, d = p - r, u raw and v applied weight, D the sum of d over a sequence.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cache

NAN, INF = math.nan, math.inf
EXACT = Context(prec=60)
Rows = list[list[float]]
Numbers = dict[str, float]


# Batches


def valid(padded: Sequence[Sequence[float]], mask: Sequence[Sequence[float]]) -> Rows:
    """The tokens whose mask is not 0."""
    return [[x for x, m in zip(xs, ms, strict=True) if m != 0] for xs, ms in zip(padded, mask, strict=True)]


def finite_only(*fields: Rows) -> list[Rows]:
    """The same fields without the tokens that are NaN or infinite in any of them."""
    result: list[Rows] = [[] for _ in fields]
    for rows in zip(*fields, strict=True):
        tokens = [token for token in zip(*rows, strict=True) if all(math.isfinite(x) for x in token)]
        for i, field in enumerate(result):
            field.append([token[i] for token in tokens])
    return result


def flat(rows: Rows) -> list[float]:
    return [x for row in rows for x in row]


def filled(rows: Rows) -> Rows:
    return [row for row in rows if row]


def ratios(train: Rows, rollout: Rows) -> Rows:
    """d of every token."""
    return [[p - r for p, r in zip(ps, rs, strict=True)] for ps, rs in zip(train, rollout, strict=True)]


# Arithmetic in which NaN and infinity come out as they do in torch


def float32(x: float) -> float:
    """x rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return INF


def log(x: float) -> float:
    return math.log(x) if x > 0 else -INF if x == 0 else NAN


def total(values: Iterable[float]) -> float:
    numbers = list(values)
    if all(math.isfinite(x) for x in numbers):
        try:
            return math.fsum(numbers)
        except OverflowError:
            pass
    result = 0.0
    for x in numbers:
        result += x
    return result


def mean(values: Sequence[float]) -> float:
    return total(values) / len(values) if values else NAN


def largest(values: Sequence[float]) -> float:
    """NaN if one is NaN."""
    return NAN if not values or any(math.isnan(x) for x in values) else max(values)


def smallest(values: Sequence[float]) -> float:
    return NAN if not values or any(math.isnan(x) for x in values) else min(values)


def clamp(x: float, low: float, high: float) -> float:
    return x if math.isnan(x) else low if x < low else high if x > high else x


def clip20(x: float) -> float:
    return clamp(x, -20.0, 20.0)


def std(values: Sequence[float], ddof: int = 0) -> float:
    if len(values) <= ddof or not all(math.isfinite(x) for x in values):
        return NAN
    with localcontext(EXACT):
        numbers = [Decimal(x) for x in values]
        middle = sum(numbers, Decimal(0)) / len(numbers)
        return float((sum(((x - middle) ** 2 for x in numbers), Decimal(0)) / (len(numbers) - ddof)).sqrt())


@cache
def k3(d: float) -> float:
    """exp(d) - 1 - d, rounded at the end: in float64 next to nothing is left of it for small d."""
    if not math.isfinite(d):
        return exp(d) - 1 - d
    with localcontext(EXACT):
        return float(Decimal(d).exp() - 1 - Decimal(d))


@cache
def train_k3(d: float) -> float:
    """w * d - w + 1 for w = exp(d)."""
    with localcontext(EXACT):
        w = Decimal(d).exp()
        return float(w * Decimal(d) - w + 1)


def effective_share(logs: Sequence[float]) -> float:
    """(sum w)² / (n sum w²) of weights given by their logs."""
    if not logs:
        return NAN
    top = max(logs)
    weights = [exp(x - top) for x in logs]
    return total(weights) ** 2 / (len(weights) * total(w * w for w in weights))


def khat(logs: Sequence[float]) -> float:
    """Shape of the tail of weights, as METRICS.md has it; an infinite log weight in it gives NaN."""
    size = len(logs)
    if size < 25:
        return NAN
    length = int(3 * math.sqrt(size)) if size > 225 else size // 5
    *_, cutoff = sorted(logs)[: size - length]
    tail = [math.expm1(x - cutoff) if x - cutoff < 700 else INF for x in sorted(logs)[size - length :]]
    quartile, top = tail[int(length / 4 + 0.5) - 1], tail[-1]
    if top == INF or quartile == 0 or top == tail[0]:
        return INF if top == INF else NAN
    points = 30 + int(math.sqrt(length))
    grid = [1 / top + (1 - math.sqrt(points / (i - 0.5))) / (3 * quartile) for i in range(1, points + 1)]
    shapes = [mean([math.log1p(-b * x) for x in tail]) for b in grid]
    scores = [length * (math.log(-b / k) - k - 1) for b, k in zip(grid, shapes, strict=True)]
    shares = [exp(score - max(scores)) for score in scores]
    b = total(share * b for share, b in zip(shares, grid, strict=True)) / total(shares)
    return (length * mean([math.log1p(-b * x) for x in tail]) + 10 * 0.5) / (length + 10)


def khat_limit(logs: Sequence[float]) -> float:
    return min(1 - 1 / math.log10(len(logs)), 0.7) if len(logs) >= 25 else NAN


def audited_khat(logs: Sequence[float], name: str) -> Numbers:
    return {f"khat_{name}": khat(logs), f"khat_threshold_{name}": khat_limit(logs)}


def share_of_weights(weights: Sequence[float]) -> float:
    """(sum w)² / (n sum w²); NaN for weights that are all 0."""
    squares = total(w * w for w in weights)
    return total(weights) ** 2 / (len(weights) * squares) if weights and squares else NAN


def quantile(values: Sequence[float], q: float) -> float:
    if not values:
        return NAN
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def neighbours(values: Sequence[float], q: float) -> tuple[float, float]:
    """The two values that the q-quantile lies between."""
    ordered, place = sorted(values), q * (len(values) - 1)
    return ordered[math.floor(place)], ordered[math.ceil(place)]


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float:
    if len(xs) < 2 or len(set(xs)) == 1 or len(set(ys)) == 1 or not all(map(math.isfinite, [*xs, *ys])):
        return NAN
    mean_x, mean_y = mean(xs), mean(ys)
    dx, dy = [x - mean_x for x in xs], [y - mean_y for y in ys]
    squares = total(x * x for x in dx), total(y * y for y in dy)
    return total(x * y for x, y in zip(dx, dy, strict=True)) / math.sqrt(squares[0]) / math.sqrt(squares[1])


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of their ranks."""
    places: dict[float, list[int]] = {}
    for place, x in enumerate(sorted(values), 1):
        places.setdefault(x, []).append(place)
    return [sum(places[x]) / len(places[x]) for x in values]


# verl's denominators


@dataclass(frozen=True)
class Mask:
    """What verl divides by, mask.sum() + 1e-8, as torch rounds it for an integer or bool mask, or a float64 one."""

    float64: bool = False

    def divisor(self, n: int) -> float:
        return n + 1e-8 if self.float64 else float32(n + 1e-8)

    def mean(self, values: Sequence[float]) -> float:
        return total(values) / self.divisor(len(values))

    def share(self, hits: Sequence[bool]) -> float:
        """A mean of zeros and ones, which torch makes in float32 unless the mask is float64."""
        share = sum(hits) / self.divisor(len(hits))
        return share if self.float64 else float32(share)

    def std(self, values: Sequence[float]) -> float:
        """sqrt(E[x²] - E[x]²), 0 for a single token, without verl's round-off."""
        if len(values) <= 1:
            return 0.0
        if not all(math.isfinite(x) for x in values):
            return NAN
        with localcontext(EXACT):
            numbers, n = [Decimal(x) for x in values], Decimal(self.divisor(len(values)))
            variance = sum((x * x for x in numbers), Decimal(0)) / n - (sum(numbers, Decimal(0)) / n) ** 2
            return float(max(variance, Decimal(0)).sqrt())


def share_of_rows(hits: Sequence[bool]) -> float:
    return float32(sum(hits) / len(hits))


# Importance weights


@dataclass(frozen=True)
class Bounds:
    """One bound truncates; two are IcePop."""

    upper: float
    lower: float | None = None

    @property
    def low(self) -> float:
        """Below it a weight counts as low."""
        return 1.0 / self.upper if self.lower is None else self.lower

    def apply(self, u: float) -> float:
        if self.lower is None:
            return self.upper if u > self.upper else u
        return u if self.lower <= u <= self.upper else 0.0

    def outside(self, u: float) -> bool:
        """Whether `apply` changes it."""
        return u > self.upper or (self.lower is not None and u < self.lower)


def token_weights(d: Rows) -> Rows:
    return [[exp(clip20(x)) for x in row] for row in d]


def sequence_weights(d: Rows) -> Rows:
    return [[exp(clip20(total(row)))] * len(row) for row in d]


def log_weights(d: Rows) -> list[float]:
    return [total(row) for row in d]


def log_weights_of_dumped(raw: Rows) -> list[float]:
    """Log of the sequence weight where only raw weights are known; empty sequences have 0, as in verl."""
    return [log(mean(row)) if row else 0.0 for row in raw]


def verl_importance(
    raw: Rows | None,
    applied: Rows,
    logs: Sequence[float] | None,
    bounds: Bounds,
    mask: Mask,
    *,
    normalize: bool = False,
    before_6806: bool = False,
) -> Numbers:
    """`logs` are the log weights of the sequences for level sequence, None for token; `raw` None where not known."""
    v = flat(applied)
    result = {"rollout_is_mean": mask.mean(v)}
    if logs is not None and raw is not None:
        low, high = float32(math.log(float32(bounds.low))), float32(math.log(float32(bounds.upper)))
        result["rollout_is_max"] = exp(clamp(largest(logs), -INF, 20.0))
        result["rollout_is_min"] = exp(smallest(logs))
        result["rollout_is_ratio_fraction_high"] = share_of_rows([x > high for x in logs])
        result["rollout_is_ratio_fraction_low"] = share_of_rows([x < low for x in logs])
    elif logs is None:
        result["rollout_is_max"], result["rollout_is_min"] = largest(v), smallest(v)
        if raw is not None:
            result["rollout_is_ratio_fraction_high"] = mask.share([u > bounds.upper for u in flat(raw)])
            result["rollout_is_ratio_fraction_low"] = mask.share([u < bounds.low for u in flat(raw)])
    within = [clamp(x, 0.0, bounds.upper) for x in v]
    result["rollout_is_std"] = mask.std(within)
    guarded = mask.mean(within) + 1e-8
    squares = mask.mean([(x / guarded) ** 2 for x in within])
    result["rollout_is_eff_sample_size"] = 1 / squares if squares else NAN
    means = [mask.mean(row) for row in applied]
    result["rollout_is_seq_mean"] = mean(means)
    result["rollout_is_seq_std"] = std(means, 1) if len(means) > 1 else 0.0
    result["rollout_is_seq_max"], result["rollout_is_seq_min"] = largest(means), smallest(means)
    result["rollout_is_seq_max_deviation"] = largest([abs(x - 1) for x in means])
    judged = means if before_6806 else None if raw is None else [mask.mean(row) for row in raw]
    if judged is not None:
        result["rollout_is_seq_fraction_high"] = share_of_rows([x > bounds.upper for x in judged])
        result["rollout_is_seq_fraction_low"] = share_of_rows([x < bounds.low for x in judged])
    if bounds.lower is not None and raw is not None:
        result["rollout_is_oob_ratio"] = mask.share([bounds.outside(u) for u in flat(raw)])
    if normalize:
        of_filled = [x for x, row in zip(means, applied, strict=True) if row]
        factor = mask.mean(v) if logs is None else mean(of_filled)
        result["rollout_is_batch_norm_factor"] = factor if factor > 1e-8 else 1.0
    unknown = ["ratio_fraction_high", "ratio_fraction_low", "seq_fraction_high", "seq_fraction_low", "max", "min"]
    unknown += ["oob_ratio"] if bounds.lower is not None else []
    return dict.fromkeys((f"rollout_is_{name}" for name in unknown), NAN) | result


def audited_importance(raw: Rows | None, applied: Rows, logs: Sequence[float] | None, bounds: Bounds) -> Numbers:
    """Sequences without a token left out; `logs` as above, of all sequences."""
    v, rows = flat(applied), filled(applied)
    means = [mean(row) for row in rows]
    result = {
        "applied_weight_mean": mean(v),
        "applied_weight_std": std(v),
        "ess_applied_tokens": share_of_weights(v),
        "ess_applied_sequences": share_of_weights(means),
        "rollout_is_seq_mean": mean(means),
        "rollout_is_seq_std": std(means, 1),
        "rollout_is_seq_max": largest(means),
        "rollout_is_seq_min": smallest(means),
        "rollout_is_seq_max_deviation": largest([abs(x - 1) for x in means]),
        "truncated_token_fraction": NAN,
        "truncated_sequence_fraction": NAN,
        "rollout_is_seq_fraction_high": NAN,
        "rollout_is_seq_fraction_low": NAN,
    }
    if raw is not None:
        result["truncated_token_fraction"] = mean([bounds.outside(u) for u in flat(raw)])
        result["truncated_sequence_fraction"] = mean([any(map(bounds.outside, row)) for row in filled(raw)])
        result["rollout_is_seq_fraction_high"] = mean([mean(row) > bounds.upper for row in filled(raw)])
        result["rollout_is_seq_fraction_low"] = mean([mean(row) < bounds.low for row in filled(raw)])
    if logs is not None:
        names = ("max", "min", "ratio_fraction_high", "ratio_fraction_low")
        result |= dict.fromkeys((f"rollout_is_{name}" for name in names), NAN)
    if logs is not None and raw is not None:
        of_filled = [x for x, row in zip(logs, applied, strict=True) if row]
        result["rollout_is_max"], result["rollout_is_min"] = exp(largest(of_filled)), exp(smallest(of_filled))
        result["rollout_is_ratio_fraction_high"] = mean([x > math.log(bounds.upper) for x in of_filled])
        result["rollout_is_ratio_fraction_low"] = mean([x < math.log(bounds.low) for x in of_filled])
    return result


def audited_dumped_raw(raw: Rows) -> Numbers:
    """What raw weights say by themselves, where there are no log-probs."""
    u = flat(raw)
    return {
        "raw_weight_mean": mean(u),
        "raw_weight_std": std(u),
        "raw_weight_min": smallest(u),
        "raw_weight_max": largest(u),
        "ess_tokens": share_of_weights(u),
        "chi2_token": mean([x * x for x in u]) - 1,
        **audited_khat([log(x) for x in u], "tokens"),
    }


# Rejection


@dataclass(frozen=True)
class Rule:
    """k1 rules have bounds of rollout / train, the others an upper bound of the statistic."""

    option: str
    upper: float
    lower: float | None = None

    @property
    def low(self) -> float:
        """Lower end of the band that the statistic is clamped into."""
        return 0.0 if self.lower is None else math.log(self.lower)

    @property
    def high(self) -> float:
        return self.upper if self.lower is None else math.log(self.upper)

    @property
    def by_token(self) -> bool:
        return self.option.startswith("token")

    def keeps(self, s: float) -> bool:
        return s <= self.high and (self.lower is None or s >= self.low)

    def of_token(self, d: float) -> float:
        x = clip20(d)
        return {"k1": -x, "k2": x * x / 2, "k3": k3(x)}[self.option[-2:]]

    def of_sequence(self, row: Sequence[float], mask: Mask) -> float:
        """The statistic of a sequence that has a token; for a token rule its mean."""
        values = [self.of_token(x) for x in row]
        if "sum" in self.option:
            return total(values)
        return largest(values) if "max" in self.option else mask.mean(values)

    def per_token(self, d: Rows, mask: Mask) -> Rows:
        """The statistic that each token is judged by."""
        if self.by_token:
            return [[self.of_token(x) for x in row] for row in d]
        return [[self.of_sequence(row, mask)] * len(row) for row in d]


def kept_by(d: Rows, rules: Sequence[Rule], mask: Mask) -> list[list[bool]]:
    """Whether every rule keeps the token."""
    kept = [[True] * len(row) for row in d]
    for rule in rules:
        for i, row in enumerate(rule.per_token(d, mask)):
            kept[i] = [before and rule.keeps(s) for before, s in zip(kept[i], row, strict=True)]
    return kept


def verl_rejection(d: Rows, rules: Sequence[Rule], mask: Mask) -> Numbers:
    result: Numbers = {}
    for rule in rules:
        name = f"rollout_rs_{rule.option}_"
        rows = rule.per_token(d, mask)
        s, of_rows = flat(rows), [rule.of_sequence(row, mask) for row in filled(d)]
        judged = s if rule.by_token else of_rows
        share = mask.share if rule.by_token else share_of_rows
        rejected = [[not rule.keeps(x) for x in row] for row in rows]
        result |= {
            f"{name}mean": mask.mean(s),
            f"{name}max": largest(judged),
            f"{name}min": smallest(judged),
            f"{name}fraction_high": share([x > rule.high for x in judged]),
            f"{name}fraction_low": 0.0 if rule.lower is None else share([x < rule.low for x in judged]),
            f"{name}std": mask.std([clamp(x, rule.low, rule.high) for x in s]),
            f"{name}seq_mean": mean(of_rows),
            f"{name}seq_std": std(of_rows, 1) if len(of_rows) > 1 else 0.0,
            f"{name}seq_max": largest(of_rows),
            f"{name}seq_min": smallest(of_rows),
            f"{name}seq_max_deviation": largest([abs(x) for x in of_rows]),
            f"{name}seq_fraction_high": share_of_rows([x > rule.high for x in of_rows]),
            f"{name}masked_fraction": mask.mean([float(x) for row in rejected for x in row]),
            f"{name}seq_masked_fraction": mean([any(row) for row in rejected if row]),
        }
        if rule.lower is not None:
            result[f"{name}seq_fraction_low"] = share_of_rows([x < rule.low for x in of_rows])
    kept = kept_by(d, rules, mask)
    result["rollout_rs_masked_fraction"] = mask.mean([float(not x) for row in kept for x in row])
    result["rollout_rs_seq_masked_fraction"] = share_of_rows([not all(row) for row in kept])
    return result


def audited_rejection(train: Rows, rollout: Rows, rules: Sequence[Rule]) -> Numbers:
    d, plain = ratios(train, rollout), Mask()
    kept = kept_by(d, rules, plain)
    result = {
        "rejected_token_fraction": mean([not x for row in kept for x in row]),
        "rejected_sequence_fraction": mean([not all(row) for row in kept if row]),
        "fully_rejected_sequence_fraction": mean([not any(row) for row in kept if row]),
    }
    for rule in rules:
        alone = kept_by(d, [rule], plain)
        result[f"rejected_by_{rule.option}_token_fraction"] = mean([not x for row in alone for x in row])
        result[f"rejected_by_{rule.option}_sequence_fraction"] = mean([not all(row) for row in alone if row])
    pairs = zip(flat(train), flat(rollout), [x for row in kept for x in row], strict=True)
    left = [(p, r) for p, r, keep in pairs if keep]
    after = audited_tokens([p for p, _ in left], [r for _, r in left])
    return result | {f"after_rejection_{key}": value for key, value in after.items()}


# Divergence


def verl_offpolicy(train: Rows, rollout: Rows, mask: Mask) -> Numbers:
    """Empty sequences count with log-perplexity 0, perplexity 1 and weight 1."""
    d = ratios(train, rollout)
    log_ppl = [-mask.mean(row) for row in train]
    rollout_log_ppl = [-mask.mean(row) for row in rollout]
    diff = [a - b for a, b in zip(log_ppl, rollout_log_ppl, strict=True)]
    return {
        "training_ppl": mean([exp(x) for x in log_ppl]),
        "training_log_ppl": mean(log_ppl),
        "kl": mask.mean([-x for x in flat(d)]),
        "k3_kl": mask.mean([k3(x) for x in flat(d)]),
        "rollout_ppl": mean([exp(x) for x in rollout_log_ppl]),
        "rollout_log_ppl": mean(rollout_log_ppl),
        "log_ppl_diff": mean(diff),
        "log_ppl_abs_diff": mean([abs(x) for x in diff]),
        "log_ppl_diff_max": largest(diff),
        "log_ppl_diff_min": smallest(diff),
        "ppl_ratio": mean([exp(x) for x in diff]),
        "chi2_token": mask.mean([exp(clip20(x)) ** 2 for x in flat(d)]) - 1,
        "chi2_seq": mean([exp(2 * clip20(total(row))) for row in d]) - 1,
    }


def audited_tokens(train: Sequence[float], rollout: Sequence[float]) -> Numbers:
    """Over tokens alone: the part of the divergence that is told once more after rejection."""
    d = [p - r for p, r in zip(train, rollout, strict=True)]
    return {
        "log_ratio_mean": mean(d),
        "log_ratio_abs_mean": mean([abs(x) for x in d]),
        "log_ratio_std": std(d),
        "log_ratio_min": smallest(d),
        "log_ratio_max": largest(d),
        "kl_rollout_train_k1": mean([-x for x in d]),
        "kl_rollout_train_k2": mean([x * x / 2 for x in d]),
        "kl_rollout_train_k3": mean([k3(x) for x in d]),
        "kl_train_rollout_k1": mean([exp(x) * x for x in d]),
        "kl_train_rollout_k3": mean([train_k3(x) for x in d]),
        "inverse_k3": mean([k3(-x) for x in d]),
        "prob_diff_abs_mean": mean([abs(exp(p) - exp(r)) for p, r in zip(train, rollout, strict=True)]),
        "prob_diff_abs_max": largest([abs(exp(p) - exp(r)) for p, r in zip(train, rollout, strict=True)]),
        "raw_weight_mean": mean([exp(x) for x in d]),
        "raw_weight_std": std([exp(x) for x in d]),
        "raw_weight_min": exp(smallest(d)),
        "raw_weight_max": exp(largest(d)),
        "chi2_token": mean([exp(2 * x) for x in d]) - 1,
        "ess_tokens": effective_share(d),
    }


def audited_offpolicy(train: Rows, rollout: Rows) -> Numbers:
    d = filled(ratios(train, rollout))
    sums = [total(row) for row in d]
    log_ppl, rollout_log_ppl = [[-mean(row) for row in filled(rows)] for rows in (train, rollout)]
    diff = [-mean(row) for row in d]
    return {
        "training_ppl": mean([exp(x) for x in log_ppl]),
        "training_log_ppl": mean(log_ppl),
        "rollout_ppl": mean([exp(x) for x in rollout_log_ppl]),
        "rollout_log_ppl": mean(rollout_log_ppl),
        "log_ppl_diff": mean(diff),
        "log_ppl_abs_diff": mean([abs(x) for x in diff]),
        "log_ppl_diff_max": largest(diff),
        "log_ppl_diff_min": smallest(diff),
        "ppl_ratio": mean([exp(x) for x in diff]),
        **audited_tokens(flat(train), flat(rollout)),
        "seq_log_weight_mean": mean(sums),
        "seq_log_weight_std": std(sums),
        "seq_log_weight_min": smallest(sums),
        "seq_log_weight_max": largest(sums),
        "chi2_seq": mean([exp(2 * x) for x in sums]) - 1,
        "ess_sequences": effective_share(sums),
        **audited_khat(flat(d), "tokens"),
        **audited_khat(sums, "sequences"),
        "clamped_tokens": sum(abs(x) > 20 for x in flat(d)) if flat(d) else NAN,
        "clamped_sequences": sum(abs(x) > 20 for x in sums) if flat(d) else NAN,
    }


# Token by token


def verl_debug(train: Rows, rollout: Rows) -> Numbers:
    probs, rollout_probs = [exp(x) for x in flat(train)], [exp(x) for x in flat(rollout)]
    gaps = [abs(a - b) for a, b in zip(probs, rollout_probs, strict=True)]
    return {
        "rollout_probs_diff_valid": 1 if gaps else 0,
        "rollout_probs_diff_max": largest(gaps),
        "rollout_probs_diff_mean": mean(gaps),
        "rollout_probs_diff_std": std(gaps, 1),
        "rollout_actor_probs_pearson_corr": pearson(probs, rollout_probs),
    }


RANKED = 32_768
"""More tokens than that are not ranked."""


def audited_debug(train: Rows, rollout: Rows) -> Numbers:
    p, r = flat(train), flat(rollout)
    d = [a - b for a, b in zip(p, r, strict=True)]
    sizes = [abs(x) for x in d]
    factors = [mean([exp(abs(x)) for x in row]) for row in filled(ratios(train, rollout))]
    probs, rollout_probs = [exp(x) for x in p], [exp(x) for x in r]
    gaps = [abs(a - b) for a, b in zip(probs, rollout_probs, strict=True)]
    return {
        "log_ratio_mean": mean(d),
        "log_ratio_std": std(d),
        "log_ratio_min": smallest(d),
        "log_ratio_max": largest(d),
        "log_prob_diff_abs_mean": mean(sizes),
        "log_prob_diff_abs_max": largest(sizes),
        "log_prob_diff_abs_std": std(sizes),
        "log_prob_diff_abs_median": quantile(sizes, 0.5),
        "log_prob_diff_abs_p90": quantile(sizes, 0.9),
        "log_prob_diff_abs_p99": quantile(sizes, 0.99),
        "log_prob_diff_abs_p999": quantile(sizes, 0.999),
        "log_prob_diff_above_ln2_fraction": mean([x > math.log(2) for x in sizes]),
        "log_prob_equal_fraction": mean([x == 0 for x in d]),
        "log_prob_pearson": pearson(p, r),
        "log_prob_spearman": pearson(ranks(p), ranks(r)) if len(p) <= RANKED else NAN,
        "prob_diff_abs_mean": mean(gaps),
        "prob_diff_abs_max": largest(gaps),
        "prob_pearson": pearson(probs, rollout_probs),
        "mean_ratio": mean([exp(x) for x in d]),
        "token_mult_prob_error": mean([exp(x) for x in sizes]),
        "seq_mult_prob_error_mean": mean(factors),
        "seq_mult_prob_error_median": quantile(factors, 0.5),
        "seq_mult_prob_error_min": smallest(factors),
        "seq_mult_prob_error_max": largest(factors),
    }


def worst_tokens(
    train: Sequence[Sequence[float]], rollout: Sequence[Sequence[float]], mask: Sequence[Sequence[float]], top: int
) -> list[tuple[int, int, float]]:
    """(row, position, d) of the largest finite |d| of padded fields; ties by row, then position."""
    found = []
    for row, (ps, rs, ms) in enumerate(zip(train, rollout, mask, strict=True)):
        for position, (p, r, m) in enumerate(zip(ps, rs, ms, strict=True)):
            if m != 0 and math.isfinite(p) and math.isfinite(r):
                found.append((row, position, p - r))
    return sorted(found, key=lambda token: (-abs(token[2]), token[0], token[1]))[:top]


# Counts


def counts(*fields: Rows) -> Numbers:
    """Sequences and tokens, before those that are not finite are left out."""
    lengths, kept = [len(row) for row in fields[0]], finite_only(*fields)[0]
    return {
        "num_sequences": len(lengths),
        "num_empty_sequences": lengths.count(0),
        "num_valid_tokens": sum(lengths),
        "num_nonfinite_tokens": sum(lengths) - len(flat(kept)),
    }
