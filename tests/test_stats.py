"""Statistics that can be added: the laws for each class, and a hand sum or a plain torch expression for each number."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout_audit.quantiles import Quantiles, SmallSample
from rollout_audit.stats import CoMoments, Extremes, Fraction, LogSumExp, Mean, Moments, TopK, Worst, largest
from rollout_audit.tails import Tail

NAN, INF = math.nan, math.inf
LIMIT = 32_768


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A parallel region for a dozen numbers takes milliseconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def f64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


# The laws: what a class keeps, made from a list of (x, y, copies), and what is read from it.

Item = tuple[float, float, int]


def moments(items: list[Item]) -> Moments:
    result = Moments()
    result.update(f64([x for x, _, _ in items]))
    return result


def moments_of_copies(items: list[Item]) -> Moments:
    result = Moments()
    result.update(f64([x for x, _, _ in items]), torch.tensor([n for _, _, n in items], dtype=torch.int64))
    return result


def simple_mean(items: list[Item]) -> Mean:
    result = Mean()
    result.update(f64([x for x, _, _ in items]))
    return result


def extremes(items: list[Item]) -> Extremes:
    result = Extremes()
    result.update(f64([x for x, _, _ in items]))
    return result


def fraction(items: list[Item]) -> Fraction:
    result = Fraction()
    result.update(f64([x for x, _, _ in items]) > 0)
    return result


def fraction_of_copies(items: list[Item]) -> Fraction:
    result = Fraction()
    result.update(f64([x for x, _, _ in items]) > 0, torch.tensor([n for _, _, n in items], dtype=torch.int64))
    return result


def co_moments(items: list[Item]) -> CoMoments:
    result = CoMoments()
    result.update(f64([x for x, _, _ in items]), f64([y for _, y, _ in items]))
    return result


def log_sum_exp(items: list[Item]) -> LogSumExp:
    result = LogSumExp()
    result.update(f64([100 * x for x, _, _ in items]))
    return result


def small_sample(items: list[Item]) -> SmallSample:
    result = SmallSample(limit=6)
    result.update(f64([[x, y] for x, y, _ in items]).reshape(-1, 2))
    return result


def quantiles(items: list[Item]) -> Quantiles:
    result = Quantiles(SmallSample(limit=6))
    result.update(f64([abs(x) for x, _, _ in items]))
    return result


def tail(items: list[Item]) -> Tail:
    result = Tail(limit=4)
    result.update(f64([x for x, _, _ in items]))
    return result


def top(items: list[Item]) -> TopK:
    result = TopK(4)
    result.add([Worst(-float(n), f"file{n % 2}", int(100 * x), int(100 * y), (x, y)) for x, y, n in items])
    return result


def read_quantiles(statistic: Quantiles) -> dict[str, Any]:
    return {str(q): statistic.at(q) for q in (0.0, 0.25, 0.5, 0.9, 1.0)} | {"exact": statistic.exact}


def read_sample(statistic: SmallSample) -> dict[str, Any]:
    values = statistic.values_NK
    return {"count": statistic.count, "values": None if values is None else sorted(values.tolist())}


def read_top(statistic: TopK) -> dict[str, Any]:
    return {"items": [asdict(item) for item in statistic.items], "floor": statistic.floor}


def read_moments(statistic: Moments) -> dict[str, Any]:
    return {
        "count": statistic.count,
        "mean": statistic.mean,
        "std": statistic.std(),
        "std1": statistic.std(ddof=1),
        "mean_square": statistic.mean_square,
    }


Make: TypeAlias = Callable[[list[Item]], Any]
Read: TypeAlias = Callable[[Any], dict[str, Any]]
CLASSES: dict[str, tuple[Make, Read]] = {
    "Moments": (moments, read_moments),
    "Moments-of-copies": (moments_of_copies, read_moments),
    "Mean": (simple_mean, lambda mean: {"count": mean.count, "value": mean.value}),
    "Extremes": (extremes, lambda e: {"min": e.min, "max": e.max, "far": e.max_deviation(1.0), "empty": e.empty}),
    "Fraction": (fraction, lambda share: {"hits": share.hits, "total": share.total, "value": share.value}),
    "Fraction-of-copies": (fraction_of_copies, lambda share: {"hits": share.hits, "value": share.value}),
    "CoMoments": (co_moments, lambda both: {"count": both.count, "pearson": both.pearson}),
    "LogSumExp": (log_sum_exp, lambda total: {"value": total.value}),
    "SmallSample": (small_sample, read_sample),
    "Quantiles": (quantiles, read_quantiles),
    "TopK": (top, read_top),
    "Tail": (tail, lambda kept: {"count": kept.count, "largest": kept.largest(9).tolist()}),
}

numbers = st.integers(-30, 30).map(lambda n: n / 10)
items = st.lists(st.tuples(numbers, numbers, st.integers(0, 5)), max_size=9)
classes = pytest.mark.parametrize(("make", "read"), CLASSES.values(), ids=CLASSES)


def joined(*statistics: Any) -> Any:
    """The first, with the others merged in that order; none is changed."""
    total = copy.deepcopy(statistics[0])
    for other in statistics[1:]:
        total.merge(copy.deepcopy(other))
    return total


def close(got: Any, want: Any) -> bool:
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(close(got[key], want[key]) for key in want)
    if isinstance(want, float) and isinstance(got, float):
        return (math.isnan(got) and math.isnan(want)) or math.isclose(got, want, rel_tol=1e-12, abs_tol=1e-12)
    return bool(got == want)


def assert_close(got: Any, want: Any) -> None:
    assert close(got, want), (got, want)


@classes
@settings(max_examples=40, deadline=None)
@given(a=items, b=items)
def test_an_update_with_all_is_the_merge_of_updates_with_parts(
    make: Make, read: Read, a: list[Item], b: list[Item]
) -> None:
    assert_close(read(joined(make(a), make(b))), read(make(a + b)))


@classes
@settings(max_examples=40, deadline=None)
@given(a=items, b=items)
def test_merging_is_commutative(make: Make, read: Read, a: list[Item], b: list[Item]) -> None:
    assert_close(read(joined(make(a), make(b))), read(joined(make(b), make(a))))


@classes
@settings(max_examples=40, deadline=None)
@given(a=items, b=items, c=items)
def test_merging_is_associative(make: Make, read: Read, a: list[Item], b: list[Item], c: list[Item]) -> None:
    left = joined(joined(make(a), make(b)), make(c))
    right = joined(make(a), joined(make(b), make(c)))
    assert_close(read(left), read(right))


@classes
@settings(max_examples=20, deadline=None)
@given(a=items)
def test_a_fresh_object_is_the_neutral_element(make: Make, read: Read, a: list[Item]) -> None:
    fresh = make([])
    assert_close(read(joined(fresh, make(a))), read(make(a)))
    assert_close(read(joined(make(a), fresh)), read(make(a)))


@classes
def test_merging_leaves_the_other_side_as_it_was(make: Make, read: Read) -> None:
    mine, other = make([(1.0, 2.0, 3)]), make([(0.5, -1.0, 2), (2.0, 1.0, 1)])
    before = read(other)
    mine.merge(other)
    mine.merge(make([(7.0, 8.0, 9)] * 8))
    assert_close(read(other), before)


def updated_in_two(make: Make, first: list[Item], second: list[Item]) -> Any:
    """The state after two updates of one object."""
    total = make(first)
    arguments: dict[Any, Callable[[], None]] = {
        moments: lambda: total.update(f64([x for x, _, _ in second])),
        simple_mean: lambda: total.update(f64([x for x, _, _ in second])),
        extremes: lambda: total.update(f64([x for x, _, _ in second])),
        fraction: lambda: total.update(f64([x for x, _, _ in second]) > 0),
        co_moments: lambda: total.update(f64([x for x, _, _ in second]), f64([y for _, y, _ in second])),
        log_sum_exp: lambda: total.update(f64([100 * x for x, _, _ in second])),
        small_sample: lambda: total.update(f64([[x, y] for x, y, _ in second]).reshape(-1, 2)),
        quantiles: lambda: total.update(f64([abs(x) for x, _, _ in second])),
        tail: lambda: total.update(f64([x for x, _, _ in second])),
    }
    arguments[make]()
    return total


@pytest.mark.parametrize(
    "name", ["Moments", "Mean", "Extremes", "Fraction", "CoMoments", "LogSumExp", "SmallSample", "Quantiles", "Tail"]
)
@settings(max_examples=30, deadline=None)
@given(a=items, b=items)
def test_a_second_update_is_a_merge(name: str, a: list[Item], b: list[Item]) -> None:
    make, read = CLASSES[name]
    assert_close(read(updated_in_two(make, a, b)), read(joined(make(a), make(b))))


# Moments


def moments_of(values: list[float], copies: list[int] | None = None) -> Moments:
    result = Moments()
    result.update(f64(values), None if copies is None else torch.tensor(copies))
    return result


def test_a_shard_of_one_token_counts() -> None:
    a, b = moments_of([1.0, 1.0, 1.0]), moments_of([2.0])
    a.merge(b)
    assert a.mean == 1.25  # not 1.5, the mean of means


def test_std_divides_by_n_or_by_n_minus_1() -> None:
    eight = moments_of([2, 4, 4, 4, 5, 5, 7, 9])  # mean 5, squared deviations 32
    assert (eight.mean, eight.var(), eight.std()) == (5.0, 4.0, 2.0)
    assert eight.std(ddof=1) == pytest.approx(math.sqrt(32 / 7))
    assert eight.mean_square == 29.0


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20))
@settings(max_examples=50, deadline=None)
def test_moments_are_torch_s(values: list[float]) -> None:
    x = f64(values)
    result = moments_of(values)
    assert result.mean == pytest.approx(float(x.mean()), rel=1e-12, abs=1e-12)
    assert result.std(ddof=1) == pytest.approx(float(x.std(correction=1)), rel=1e-9, abs=1e-12)
    assert result.mean_square == pytest.approx(float(x.square().mean()), rel=1e-12, abs=1e-12)


def test_each_value_can_stand_for_copies() -> None:
    short, written_out = moments_of([1.0, 4.0, 9.0], [3, 0, 2]), moments_of([1.0, 1.0, 1.0, 9.0, 9.0])
    assert (short.count, short.mean) == (written_out.count, written_out.mean) == (5, 4.2)
    assert short.std() == pytest.approx(written_out.std(), rel=1e-14)


def test_a_tiny_spread_around_1_survives_chunks() -> None:
    whole = Moments()
    for part in range(10):
        whole.update(1.0 + 1e-8 * torch.arange(part * 100, part * 100 + 100, dtype=torch.float64))
    # std of 0..999 is sqrt((1000**2 - 1) / 12); the spacing of float64 near 1 is 2e-16
    assert whole.std() == pytest.approx(1e-8 * math.sqrt((1000**2 - 1) / 12), rel=1e-7)


def test_a_constant_has_no_spread_and_one_value_no_unbiased_spread() -> None:
    constant = Moments.constant(0.1, 7)
    assert constant.mean == pytest.approx(0.1)
    assert constant.std() == 0.0
    constant.merge(moments_of([0.1] * 3))
    assert constant.std() == pytest.approx(0.0, abs=1e-15)
    assert math.isnan(moments_of([5.0]).std(ddof=1))
    assert Moments.constant(3.0, 0) == Moments()


@pytest.mark.parametrize(
    "value",
    [Moments().mean, Moments().std(), Moments().mean_square, Mean().value, Fraction().value, CoMoments().pearson,
     Extremes().min, Extremes().max, Extremes().max_deviation(1.0), Quantiles().at(0.5)],
)  # fmt: skip
def test_a_statistic_of_nothing_is_nan(value: float) -> None:
    assert math.isnan(value)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_shows_in_moments_whichever_side_has_it(bad: float) -> None:
    for first, second in (([1.0, 2.0], [bad]), ([bad], [1.0, 2.0])):
        total = moments_of(first)
        total.merge(moments_of(second))
        assert not math.isfinite(total.mean)
        assert math.isnan(total.std())


def test_moments_too_large_to_square_are_infinite_and_raise_nothing() -> None:
    assert moments_of([1e200, 1e200]).mean_square == INF


# Mean


def test_a_mean_adds_sums_and_counts() -> None:
    total = Mean()
    total.update(f64([1.0, 2.0]))
    total.merge(Mean(1, 6.0))
    assert (total.count, total.value) == (3, 3.0)


# Extremes


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
def test_nan_propagates_through_extremes_in_any_order(order: list[int]) -> None:
    parts = [extremes([(1.0, 0.0, 0)]), extremes([(NAN, 0.0, 0), (2.0, 0.0, 0)]), extremes([(5.0, 0.0, 0)])]
    total = Extremes()
    for index in order:
        total.merge(parts[index])
    assert math.isnan(total.min)
    assert math.isnan(total.max)
    assert math.isnan(total.max_deviation(0.0))
    assert not total.empty


def test_extremes_are_the_smallest_and_largest_and_what_is_farthest_from_a_center() -> None:
    both = extremes([(3.0, 0.0, 0), (-1.0, 0.0, 0), (2.0, 0.0, 0)])
    assert (both.min, both.max) == (-1.0, 3.0)
    assert (both.max_deviation(0.0), both.max_deviation(2.5)) == (3.0, 3.5)


def test_infinite_extremes_are_infinite_and_not_empty() -> None:
    both = extremes([(-INF, 0.0, 0), (INF, 0.0, 0)])
    assert (both.min, both.max, both.empty) == (-INF, INF, False)


def test_constant_extremes_of_no_copies_are_empty() -> None:
    assert Extremes.constant(1.0, 0).empty
    assert Extremes.constant(1.0, 3) == Extremes(1.0, 1.0)


# Fraction


def test_a_fraction_of_shards_is_of_all_tokens() -> None:
    total = fraction([(1.0, 0.0, 0)])  # 1 of 1
    total.merge(fraction([(-1.0, 0.0, 0)] * 3))  # 0 of 3
    assert (total.hits, total.total, total.value) == (1, 4, 0.25)


def test_a_fraction_counts_copies() -> None:
    total = Fraction()
    total.update(torch.tensor([True, False]), torch.tensor([3, 5]))
    assert (total.hits, total.total) == (3, 8)


# CoMoments


def pearson_of(x: Any, y: Any) -> float:
    both = CoMoments()
    both.update(f64(x), f64(y))
    return both.pearson


def test_pearson_of_four_pairs_is_the_hand_sum() -> None:
    # deviations -1.5 -0.5 0.5 1.5 and -1.25 -0.25 -0.25 1.75: products 4.5, squares 5 and 4.75
    assert pearson_of([1, 2, 3, 4], [2, 3, 3, 5]) == pytest.approx(4.5 / math.sqrt(5 * 4.75), rel=1e-15)


@pytest.mark.parametrize("constant", [0.0, 0.1, -3.3, 1e6])
def test_pearson_of_a_constant_is_nan_in_one_piece_and_in_several(constant: float) -> None:
    total = CoMoments()
    for part in range(5):
        x = torch.arange(7 * part, 7 * part + 7, dtype=torch.float64)
        assert math.isnan(pearson_of(x, torch.full((7,), constant)))
        total.update(x, torch.full((7,), constant, dtype=torch.float64))
    assert math.isnan(total.pearson)


def test_pearson_of_one_pair_or_with_nan_is_nan() -> None:
    assert math.isnan(pearson_of([1.0], [2.0]))
    assert math.isnan(pearson_of([1.0, 2.0, NAN], [1.0, 2.0, 3.0]))


def test_pearson_is_torch_s_and_never_beyond_1() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, generator=generator, dtype=torch.float64)
    y = 0.3 * x + torch.randn(500, generator=generator, dtype=torch.float64)
    assert pearson_of(x, y) == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]), rel=1e-13)
    assert pearson_of(x, -y) == -pearson_of(x, y)
    assert pearson_of(x, 3 * x + 1) <= 1.0
    assert pearson_of(x, 3 * x + 1) == pytest.approx(1.0)


def test_pearson_sees_a_small_spread_on_a_large_mean() -> None:
    x = f64([1.0, 2.0, 3.0, 4.0])
    assert pearson_of(1e6 + 1e-3 * x, x) == pytest.approx(1.0)


# LogSumExp


def test_log_sum_exp_adds_weights_that_would_overflow() -> None:
    total = LogSumExp()
    total.update(f64([1000.0]))
    total.merge(log_sum_exp([(10.0, 0.0, 0)]))  # 100 times 10
    assert total.value == pytest.approx(1000 + math.log(2), rel=1e-15)


def test_log_sum_exp_of_nothing_is_the_log_of_0_and_of_infinity_infinite() -> None:
    assert LogSumExp().value == -INF
    for parts in ([INF, 0.0], [0.0, INF], [-INF, INF]):
        total = LogSumExp()
        for part in parts:
            total.merge(LogSumExp(part))
        assert total.value == INF


@pytest.mark.parametrize("parts", [[NAN, 0.0], [0.0, NAN], [INF, NAN], [NAN, -INF]])
def test_nan_propagates_through_log_sum_exp(parts: list[float]) -> None:
    total = LogSumExp()
    for part in parts:
        total.merge(LogSumExp(part))
    assert math.isnan(total.value)


# SmallSample


@pytest.mark.parametrize("cut", [[6], [1, 5], [3, 3], [0, 6], [2, 2, 2]])
def test_a_small_sample_keeps_everything_up_to_the_limit_and_nothing_beyond(cut: list[int]) -> None:
    total, values = SmallSample(limit=6), torch.arange(12, dtype=torch.float64).reshape(6, 2)
    for part in torch.split(values, cut):
        total.update(part)
    kept = total.values_NK
    assert kept is not None
    assert torch.equal(kept, values)
    total.update(values[:0])
    assert total.values_NK is not None
    for count in (7, 8):
        total.update(values[:1])
        assert total.values_NK is None
        assert total.count == count


def test_a_small_sample_keeps_a_copy() -> None:
    values = torch.ones(2, 1, dtype=torch.float64)
    total = SmallSample()
    total.update(values)
    values[:] = 7.0
    assert total.values_NK is not None
    assert total.values_NK.tolist() == [[1.0], [1.0]]


# Quantiles


QS = (0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0)


def values_of(number: int, seed: int = 0) -> Tensor:
    """Log-normal over 30 octaves."""
    return (2.5 * torch.randn(number, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).exp()


def quantiles_of(*parts: Tensor) -> Quantiles:
    total = Quantiles()
    for part in parts:
        total.update(part)
    return total


def test_quantiles_are_torch_s_up_to_the_limit() -> None:
    values = values_of(LIMIT)
    whole, cut = quantiles_of(values), quantiles_of(*torch.split(values, 1000))
    assert whole.exact
    for q in QS:
        assert whole.at(q) == pytest.approx(float(torch.quantile(values, q)), rel=1e-15)
        assert cut.at(q) == whole.at(q)


def test_a_median_lies_in_the_middle_of_its_neighbours() -> None:
    assert quantiles_of(f64([4.0, 0.0, 2.0, 1.0])).at(0.5) == 1.5
    assert quantiles_of(f64([4.0, 0.0, 2.0])).at(0.25) == 1.0


@pytest.mark.parametrize("number", [LIMIT + 1, 100_000])
def test_quantiles_beyond_the_limit_are_the_ranked_value_to_one_in_a_thousand(number: int) -> None:
    values = values_of(number)
    whole = quantiles_of(values)
    ordered = values.sort().values
    assert not whole.exact
    for q in (0.0, 0.1, 0.5, 0.75, 1.0):
        below, above = (float(ordered[rank(q * (number - 1))]) for rank in (math.floor, math.ceil))
        assert 0.999 * below <= whole.at(q) <= 1.001 * above


def test_quantiles_beyond_the_limit_follow_the_rank_to_the_value() -> None:
    """Of 0, 1, ..., 99,999 in thousandths the q-quantile is q * 99.999."""
    whole = quantiles_of(torch.arange(100_000, dtype=torch.float64) / 1000)
    for q in (0.1, 0.5, 0.9, 0.99, 0.999, 1.0):
        assert whole.at(q) == pytest.approx(q * 99.999, rel=1e-3)


TWO_VALUES = torch.tensor([1.0, 3.0], dtype=torch.float64).repeat(20_000)
HALF_NORMAL = torch.randn(40_500, generator=torch.Generator().manual_seed(5), dtype=torch.float64).abs()


@pytest.mark.parametrize(("values", "q"), [(TWO_VALUES, 0.5), (HALF_NORMAL, 0.9999)], ids=["two-values", "tail"])
def test_quantiles_beyond_the_limit_lie_between_neighbours_that_are_far_apart(values: Tensor, q: float) -> None:
    assert quantiles_of(values).at(q) == pytest.approx(float(torch.quantile(values, q)), rel=1e-3)


@pytest.mark.parametrize(
    "sizes", [[40_000], [1, 39_999], [20_000, 20_000], [33_000, 7_000], [7_000, 33_000], [4_000] * 10]
)
def test_quantiles_are_the_same_for_any_split(sizes: list[int]) -> None:
    values = values_of(40_000)
    whole = quantiles_of(values)
    parts = torch.split(values, sizes)
    merged, backwards = Quantiles(), Quantiles()
    for part in parts:
        merged.merge(quantiles_of(part))
    for part in reversed(parts):
        backwards.merge(quantiles_of(part))
    for q in QS:
        assert merged.at(q) == backwards.at(q) == quantiles_of(*parts).at(q) == whole.at(q)


def test_quantiles_of_values_off_the_grid_are_0_below_and_cut_above() -> None:
    low = quantiles_of(torch.full((LIMIT + 1,), 1e-13, dtype=torch.float64))
    assert low.at(0.5) == 0.0
    assert quantiles_of(torch.zeros(LIMIT + 1, dtype=torch.float64)).at(0.5) == 0.0
    high = quantiles_of(torch.full((LIMIT + 1,), 1e9, dtype=torch.float64))
    assert high.at(0.5) == pytest.approx(2.0**24, rel=1e-3)


@given(st.floats(2.0**-39, 2.0**24 * 0.99))
@settings(max_examples=50, deadline=None)
def test_a_value_on_the_grid_comes_back_to_one_in_a_thousand(value: float) -> None:
    total = Quantiles(SmallSample(limit=2))
    total.update(f64([value] * 3))
    assert total.at(0.5) == pytest.approx(value, rel=1e-3)


# TopK


def worst(size: float, path: str = "a", row: int = 0, position: int = 0) -> Worst:
    return Worst(-size, path, row, position)


def test_top_k_keeps_the_largest_and_ties_go_to_the_earlier_place() -> None:
    tied = [worst(2.0, "b", 0, 0), worst(2.0, "a", 1, 0), worst(2.0, "a", 0, 5), worst(2.0, "a", 0, 4)]
    total = TopK(4)
    total.add([worst(1.0, "a", 0, 0), *tied])
    assert total.items[0] == worst(2.0, "a", 0, 4)
    assert [(item.path, item.row, item.position) for item in total.items] == [
        ("a", 0, 4), ("a", 0, 5), ("a", 1, 0), ("b", 0, 0),
    ]  # fmt: skip
    total.add([worst(3.0, "z")])
    assert [item.key for item in total.items] == [-3.0, -2.0, -2.0, -2.0]
    assert total.items[-1] == worst(2.0, "a", 1, 0)


def test_the_floor_of_top_k_is_what_must_be_reached_to_get_in() -> None:
    total = TopK(2)
    assert total.floor == -INF
    total.add([worst(5.0)])
    assert total.floor == -INF
    total.add([worst(3.0)])
    assert total.floor == 3.0
    total.add([worst(4.0)])
    assert total.floor == 4.0


def test_top_0_keeps_nothing() -> None:
    total = TopK(0)
    total.add([worst(1.0)])
    assert total.items == []


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 8))
@settings(max_examples=100, deadline=None)
def test_largest_is_a_stable_sort(sizes: list[int], k: int) -> None:
    want = sorted(range(len(sizes)), key=lambda index: -sizes[index])[:k]
    assert sorted(largest(f64(sizes), k).tolist()) == sorted(want)
