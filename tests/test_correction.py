"""The sentence on whether importance sampling can correct a batch: grades by hand, and where it is shown."""

from __future__ import annotations

import math

import pytest
import torch

from rollout_audit.diagnosis.correction import Weights, can_be_corrected
from tests.conftest import Cli, Write

FINE = Weights(0.1, 0.7, 0.99, 5_000)


@pytest.mark.parametrize(
    ("khat", "ess", "grade"),
    [
        (0.1, 0.99, "fine"),
        (0.7, 0.3, "fine"),
        (-0.2, 0.5, "fine"),
        (0.1, 0.29, "costly"),
        (0.7, 0.05, "costly"),
        (0.71, 0.99, "unreliable"),
        (0.99, 0.06, "unreliable"),
        (1.0, 0.99, "useless"),
        (0.1, 0.049, "useless"),
        (math.inf, 0.5, "useless"),
        (math.nan, 0.99, "fine"),
        (math.nan, 0.1, "costly"),
        (math.nan, 0.01, "useless"),
    ],
)
def test_grades_by_hand(khat: float, ess: float, grade: str) -> None:
    assert Weights(khat, 0.7, ess, 100).grade == grade


def test_nothing_is_said_where_both_are_fine_or_unknown() -> None:
    unknown = Weights(math.nan, math.nan, math.nan, 0)
    assert [can_be_corrected(*pair) for pair in ((FINE, FINE), (unknown, FINE), (FINE, unknown))] == ["", "", ""]


def test_the_sentence_says_what_each_is_worth_and_what_to_do() -> None:
    assert can_be_corrected(FINE, Weights(1.3, 0.667, 0.02, 1_024)) == (
        "token weights fine (k-hat 0.10, limit 0.70; ESS 99 % of 5,000); "
        "sequence weights useless (k-hat 1.30, limit 0.67; ESS 2 % of 1,024): "
        "use token-level truncation (rollout_is token) or rejection by the geometric mean (rollout_rs seq_mean_k1)"
    )
    few = can_be_corrected(Weights(0.3, 0.7, 0.002, 900), Weights(math.nan, math.nan, 0.5, 9))
    assert few.startswith("token weights useless (k-hat 0.30, limit 0.70; ESS 0.2 % of 900)")
    assert "sequence weights fine (k-hat not known; ESS 50 % of 9): no weights correct this batch" in few


def long_rows(write: Write, noise: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(64, 500, generator=generator)
    old = rollout + noise * torch.randn(64, 500, generator=generator)
    mask = torch.ones(64, 500, dtype=torch.int64)
    write(rollout_log_probs=rollout, old_log_probs=old, response_mask=mask, responses=None)


def test_it_stands_below_the_tables_and_in_the_notes(write: Write, cli: Cli) -> None:
    long_rows(write, 0.5)
    words = "token weights fine ("
    answer = cli("is-metrics", "dump.safetensors")
    assert answer.out.count(words) == 1
    assert words not in answer.err
    (note,) = [note for note in cli("is-metrics", "dump.safetensors", "--json").document["notes"] if not note["about"]]
    assert note["text"].startswith(words)
    assert "sequence weights useless" in note["text"]


def test_a_fine_batch_is_not_commented_on(write: Write, cli: Cli) -> None:
    long_rows(write, 0.002)
    assert cli("is-metrics", "dump.safetensors", "--json").document["notes"] == []
