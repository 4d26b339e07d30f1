"""k-hat is what arviz-stats says, for any split; a tail keeps the largest values, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout_audit.kernels.psis import khat_threshold, pareto_khat, tail_length
from rollout_audit.metrics.family import audited_khat
from rollout_audit.saving import _encode
from rollout_audit.tails import Tail
from tests import reference as slow

Values = npt.NDArray[np.float64]
NAN, INF = math.nan, math.inf

LAWS: dict[str, Callable[[np.random.Generator, int], Values]] = {
    "normal, as of bf16": lambda random, n: 0.02 * random.standard_normal(n),
    "nearly equal": lambda random, n: 1e-6 * random.standard_normal(n),
    "log-normal": lambda random, n: 3 * random.standard_normal(n),
    "far apart": lambda random, n: 30 * random.standard_normal(n),
    "Pareto, k = 2": lambda random, n: random.exponential(2.0, n),
    "Pareto, k = 0.5": lambda random, n: random.exponential(0.5, n),
    "bounded": lambda random, n: np.log(random.random(n)),
    "stored as float32": lambda random, n: (0.05 * random.standard_normal(n)).astype(np.float32).astype(np.float64),
    "sequences": lambda random, n: 0.05 * random.standard_normal(n) * np.sqrt(random.integers(1, 4000, n)),
}


def tail_of(*parts: Values | Tensor | list[float], limit: int = 8192) -> Tail:
    total = Tail(limit)
    for part in parts:
        one = Tail(limit)
        one.update(torch.as_tensor(part, dtype=torch.float64))
        total.merge(one)
    return total


def khat_of(tail: Tail) -> float:
    return float(audited_khat(tail, "values", "x")["khat_x"].value)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("size", [25, 26, 31, 99, 224, 225, 226, 227, 1_000, 30_000, 1_000_000])
def test_khat_is_that_of_arviz(size: int, law: Callable[[np.random.Generator, int], Values]) -> None:
    arviz = pytest.importorskip("arviz_stats.base")
    for seed in range(2 if size == 1_000_000 else 10):
        logs = law(np.random.default_rng(seed), size)
        expected = float(arviz.array_stats.psislw(-logs)[1])  # it takes the negative, as of a leave-one-out
        got = khat_of(tail_of(*np.array_split(logs, 7)))
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)
        if size < 1_000:
            assert got == pytest.approx(slow.khat(logs.tolist()), rel=1e-9, abs=1e-9)


def test_khat_finds_the_shape_of_a_pareto_law() -> None:
    for shape in (0.2, 0.7, 1.5):
        logs = np.random.default_rng(1).exponential(shape, 400_000)
        assert khat_of(tail_of(logs)) == pytest.approx(shape, abs=0.1)


def test_the_length_of_the_tail_by_hand() -> None:
    sizes = {24: 4, 25: 5, 29: 5, 100: 20, 225: 45, 226: 45, 400: 60, 10_000: 300, 1_000_000: 3_000}
    assert {size: tail_length(size) for size in sizes} == sizes


def test_the_threshold_by_hand() -> None:
    assert khat_threshold(100) == 0.5
    assert khat_threshold(10_000) == 0.7
    assert khat_threshold(1_000) == pytest.approx(2 / 3)
    assert math.isnan(khat_threshold(1))


def test_a_shift_of_all_logs_changes_nothing() -> None:
    logs = np.random.default_rng(3).standard_normal(5_000)
    assert khat_of(tail_of(logs + 5_000)) == pytest.approx(khat_of(tail_of(logs)), rel=1e-9)


NUMBERS = list(np.linspace(-1, 1, 40))


@pytest.mark.parametrize(
    ("logs", "why"),
    [
        ([0.5] * 40, "all the same"),
        ([0.0] * 30 + [1.0] * 10, "all the same"),  # the tail is the last 8
        ([0.0] * 36 + [1.0, 2.0, 3.0, 4.0], "all the same"),  # half of the tail equals the cutoff
        (NUMBERS[:24], "25 weights or more"),
        ([], "25 weights or more"),
        ([*NUMBERS, 800.0], "more than float64"),
        ([*NUMBERS, INF], "more than float64"),
        ([*NUMBERS, NAN], "all the same"),
    ],
)
def test_what_has_no_khat_has_a_reason(logs: list[float], why: str) -> None:
    number = audited_khat(tail_of(logs), "weights", "x")["khat_x"]
    assert not math.isfinite(number.value)
    assert why in number.why_null
    assert not math.isfinite(slow.khat(logs)) or NAN in logs


def test_fewer_than_five_have_no_khat() -> None:
    assert math.isnan(pareto_khat(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), 0.0))


# The tail itself


def largest_of(values: list[float], number: int) -> list[float]:
    return sorted(values)[max(0, len(values) - number) :]


def state_of(tail: Tail) -> Any:
    return tail.count, tail.spoiled, tail.largest(10**9).tolist()


parts_of_values = st.lists(st.lists(st.integers(-9, 9).map(float), max_size=30), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(parts=parts_of_values, limit=st.integers(1, 12), data=st.data())
def test_any_split_keeps_the_same_values(parts: list[list[float]], limit: int, data: st.DataObject) -> None:
    everything = [x for part in parts for x in part]
    tails = [Tail(limit)]
    for part in parts:
        if data.draw(st.booleans(), label="another object"):
            tails.append(Tail(limit))
        tails[-1].update(torch.tensor(part, dtype=torch.float64))
    while len(tails) > 1:
        other = tails.pop(data.draw(st.integers(0, len(tails) - 1)))
        other = other.compact() if data.draw(st.booleans(), label="saved") else other
        tails[data.draw(st.integers(0, len(tails) - 1))].merge(other)
    assert state_of(tails[0]) == (len(everything), False, largest_of(everything, limit))
    assert state_of(tails[0].compact()) == state_of(tails[0])


def test_many_values_in_chunks_are_those_of_a_sort() -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = Tail()
    for chunk in torch.split(values, 41_000):
        total.update(chunk, float(chunk.max()))
    assert total.count == 300_000
    assert torch.equal(total.largest(5_000), values.sort().values[-5_000:])
    assert total.buffer is not None
    assert total.buffer.numel() == 2 * total.limit


def test_a_nan_spoils_a_tail_and_what_it_is_merged_with() -> None:
    for tail in (tail_of([1.0, NAN, 2.0]), tail_of([1.0], [NAN]), tail_of([NAN], [1.0] * 30, limit=4)):
        assert tail.spoiled
        assert tail.buffer is None
        assert math.isnan(khat_of(tail))


def test_infinities_are_values() -> None:
    assert tail_of([INF, 1.0], [-INF], limit=2).largest(9).tolist() == [1.0, INF]
    assert tail_of([-INF] * 5, [0.0], limit=2).largest(9).tolist() == [-INF, 0.0]


def test_few_values_are_saved_as_few() -> None:
    tensors: dict[str, Tensor] = {}
    _encode(tail_of([1.0, 2.0, 3.0]), tensors)
    assert [x.numel() for x in tensors.values()] == [3]
