"""debug-compare DUMP OTHER: rollout values from one file, train values from the other, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import Cli, Run, Write, save_tensors

Compare = Callable[..., dict[str, Any]]

LENGTHS = [3, 2, 1, 3]
STEPS = [0.5, -0.25, 1.0, 0.125]
"""Row i: rollout -1 - i/8 - position; the train side is STEPS[i] above it."""
UID = [70, 80, 90, 60]


def rows(values: Callable[[int, int], float], width: int, left: bool = False, fill: float = 7.0) -> Tensor:
    """Padded rows of LENGTHS: value(row, position), padded on one side with something that must not be counted."""
    padded = torch.full((len(LENGTHS), width), fill, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        for position in range(length):
            padded[row, position + (width - length if left else 0)] = values(row, position)
    return padded


def rollout_side(width: int = 3, left: bool = False) -> dict[str, Tensor]:
    return {
        "rollout_log_probs": rows(lambda row, position: -1 - row / 8 - position, width, left),
        "response_mask": rows(lambda row, position: 1.0, width, left, fill=0.0).to(torch.uint8),
        "responses": rows(lambda row, position: 100 * row + position, width, left, fill=9.0).long(),
        "uid": torch.tensor(UID),
    }


def train_side(width: int = 3, left: bool = False) -> dict[str, Tensor]:
    side = rollout_side(width, left)
    side["old_log_probs"] = side.pop("rollout_log_probs")
    steps = torch.tensor(STEPS, dtype=torch.float64)[:, None]
    side["old_log_probs"] = torch.where(side["response_mask"] > 0, side["old_log_probs"] + steps, math.nan)
    return side


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(write: Write) -> None:
    """`write` makes the test's folder the working directory."""


@pytest.fixture
def compare(cli: Cli) -> Compare:
    """debug-compare of two sides given as tensors, as its document."""

    def call(rollout: dict[str, Any], train: dict[str, Any], *words: str) -> dict[str, Any]:
        save_tensors("rollout.safetensors", rollout)
        save_tensors("train.safetensors", train)
        answer = cli("debug-compare", "rollout.safetensors", "train.safetensors", "--json", "--top", "100", *words)
        assert answer.status == 0, answer
        return answer.document

    return call


def without(side: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in side.items() if name not in names}


def permuted(side: dict[str, Tensor], order: list[int]) -> dict[str, Tensor]:
    return {name: tensor[order] for name, tensor in side.items()}


def right(document: dict[str, Any]) -> None:
    """The log ratios are STEPS, each as often as its row has tokens; every token is where it was."""
    steps = [step for step, length in zip(STEPS, LENGTHS, strict=True) for _ in range(length)]
    mean = sum(steps) / len(steps)
    audited = document["audited"]
    assert audited["num_valid_tokens"] == 9
    assert audited["num_nonfinite_tokens"] == 0
    assert audited["log_ratio_mean"] == pytest.approx(mean, rel=1e-12)
    assert audited["log_prob_diff_abs_max"] == 1.0
    assert audited["mean_ratio"] == pytest.approx(sum(math.exp(step) for step in steps) / 9, rel=1e-12)
    tokens = document["worst_tokens"]
    assert sorted((token["row"], token["log_ratio"]) for token in tokens) == sorted(
        (row, STEPS[row]) for row, length in enumerate(LENGTHS) for _ in range(length)
    )
    for token in tokens:
        assert token["path"] == "rollout.safetensors"
        assert token["train_log_prob"] - token["rollout_log_prob"] == token["log_ratio"]


def test_rows_in_the_same_order_are_compared_row_by_row(compare: Compare) -> None:
    document = compare(rollout_side(), train_side())
    right(document)
    assert document["settings"]["match"] == "uid"
    without_uid = compare(without(rollout_side(), "uid"), train_side())
    right(without_uid)
    assert without_uid["settings"]["match"] == "order"
    assert document["metrics"] == without_uid["metrics"]


def test_the_numbers_are_those_of_one_file_with_both(compare: Compare, cli: Cli) -> None:
    document = compare(rollout_side(), train_side())
    save_tensors("both.safetensors", rollout_side() | without(train_side(), "uid"))
    one = cli("debug-compare", "both.safetensors", "--json").document
    assert document["metrics"] == one["metrics"]
    assert document["audited"] == one["audited"]


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 0, 3, 2], [2, 0, 3, 1]])
@pytest.mark.parametrize("chunk", [262_144, 6, 1])
def test_shuffled_rows_find_each_other_by_uid(
    order: list[int], chunk: int, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_audit.audit.CHUNK_TOKENS", chunk)
    document = compare(rollout_side(), permuted(train_side(), order))
    right(document)
    assert document["token_id_differences"]["differing_tokens"] == 0


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
@pytest.mark.parametrize("chunk", [262_144, 6, 1])
@pytest.mark.parametrize("lacks", ["rollout", "train"])
def test_a_side_without_a_mask_takes_that_of_the_row_it_is_matched_with(
    lacks: str, chunk: int, order: list[int], compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_audit.audit.CHUNK_TOKENS", chunk)
    sides = {"rollout": rollout_side(), "train": permuted(train_side(), order)}
    has = "train" if lacks == "rollout" else "rollout"
    sides[lacks] = without(sides[lacks], "response_mask")
    document = compare(sides["rollout"], sides["train"])
    right(document)
    assert document["notes"] == [
        {"text": f"{lacks}.safetensors: no mask: that of {has}.safetensors was taken", "about": []}
    ]
    masks = {dump["path"].removesuffix(".safetensors"): dump["mask"] for dump in document["inputs"]}
    assert masks == {has: "response_mask", lacks: f"response_mask of {has}.safetensors"}


def test_a_uid_of_several_numbers_and_of_another_type_matches(compare: Compare) -> None:
    rollout, train = rollout_side(), train_side()
    rollout["uid"] = torch.tensor([[1, 2], [1, 3], [2, 1], [2, 2]], dtype=torch.int32)
    train["uid"] = rollout["uid"].to(torch.uint64)
    right(compare(rollout, permuted(train, [3, 1, 0, 2])))


def test_rows_that_share_a_uid_are_matched_in_their_order(compare: Compare) -> None:
    """Samples of one prompt: uids a, b, a, b against b, a, b, a."""
    rollout, train = rollout_side(), train_side()
    rollout["uid"] = train["uid"] = torch.tensor([1, 2, 1, 2])
    document = compare(rollout, permuted(train, [1, 0, 3, 2]))
    right(document)
    assert "the n-th row of a uid was matched with the n-th" in document["notes"][0]["text"]


def test_match_order_leaves_uids_aside(compare: Compare, cli: Cli) -> None:
    train = train_side()
    train["uid"] = torch.tensor([[[1.5]], [[2.5]], [[3.5]], [[4.5]]])
    document = compare(rollout_side(), train, "--match", "order")
    right(document)
    assert document["settings"]["match"] == "order"
    refused = cli("debug-compare", "rollout.safetensors", "train.safetensors")
    assert refused.message("train.safetensors: shapes differ")


@pytest.mark.parametrize(("ours", "theirs"), [((3, False), (6, True)), ((6, True), (3, False)), ((5, True), (8, True))])
def test_padding_may_differ_in_width_and_side(
    ours: tuple[int, bool], theirs: tuple[int, bool], compare: Compare
) -> None:
    document = compare(rollout_side(*ours), train_side(*theirs))
    right(document)
    assert document["token_id_differences"]["differing_tokens"] == 0
    first = 0 if not ours[1] else ours[0] - LENGTHS[2]
    (token,) = [token for token in document["worst_tokens"] if token["row"] == 2]
    assert (token["position"], token["token_id"]) == (first, 200), "positions and ids are those of the rollout side"
    assert [dump["padded_tokens"] for dump in document["inputs"]] == [4 * ours[0], 4 * theirs[0]]


def test_keys_say_which_tensor_is_which_side(compare: Compare, cli: Cli) -> None:
    rollout, train = rollout_side(), train_side()
    rollout["lp"] = rollout.pop("rollout_log_probs")
    train["lp"] = train.pop("old_log_probs")
    document = compare(rollout, train, "--rollout-key", "lp", "--actor-key", "lp")
    right(document)
    assert [note["text"] for note in document["notes"]] == [
        "rollout.safetensors: lp was taken for rollout_log_probs (--field)",
        "train.safetensors: lp was taken for old_log_probs (--field)",
    ]
    words = ["debug-compare", "rollout.safetensors", "train.safetensors"]
    assert cli(*words).message("rollout.safetensors: no rollout_log_probs")
    assert cli(*words, "--rollout-key", "lp").message("train.safetensors: no old_log_probs")
    message = cli(*words, "--rollout-key", "lq").message("rollout.safetensors: no tensor 'lq'")
    assert message["found"] == "lp, response_mask, responses, uid"


def test_keys_work_for_one_file_too(cli: Cli) -> None:
    tensors = rollout_side() | {"other": train_side()["old_log_probs"]}
    save_tensors("one.safetensors", tensors)
    words = ["debug-compare", "one.safetensors", "--json"]
    document = cli(*words, "--actor-key", "other").document
    assert document["audited"]["log_prob_diff_abs_max"] == 1.0
    assert cli(*words, "--rollout-key", "other", "--actor-key", "rollout_log_probs").document["audited"][
        "log_ratio_mean"
    ] == pytest.approx(-document["audited"]["log_ratio_mean"], rel=1e-12)


def test_a_field_option_is_meant_for_the_file_that_has_the_tensor(compare: Compare, cli: Cli) -> None:
    rollout, train = rollout_side(), without(train_side(), "response_mask")
    rollout["valid"] = rollout.pop("response_mask")
    right(compare(rollout, train, "--field", "response_mask=valid"))
    answer = cli("debug-compare", "rollout.safetensors", "train.safetensors", "--field", "response_mask=vaild")
    message = answer.message("rollout.safetensors: no tensor 'vaild', here or in train.safetensors")
    assert "valid" in message["found"].split(", ")


def test_two_complete_dumps_give_the_rollout_of_one_and_the_train_of_the_other(compare: Compare) -> None:
    nonsense = torch.full((4, 3), -50.0, dtype=torch.float64)
    right(compare(rollout_side() | {"old_log_probs": nonsense}, train_side() | {"rollout_log_probs": nonsense}))


def test_token_ids_that_differ_are_counted_and_the_first_place_is_named(compare: Compare) -> None:
    train = train_side(width=5, left=True)
    train["responses"][0, -1] += 1  # the third token of row 0
    train["responses"][3, -2:] += 1  # the second and third of row 3
    train["responses"][1, 0] += 1  # padding
    document = compare(rollout_side(), train)
    right(document)
    assert document["token_id_differences"] == {
        "differing_tokens": 3,
        "tokens": 9,
        "differing_sequences": 2,
        "sequences": 4,
        "worst_sequences": [
            {"path": "rollout.safetensors", "row": 3, "differing": 2, "first_position": 1},
            {"path": "rollout.safetensors", "row": 0, "differing": 1, "first_position": 2},
        ],
    }


def test_the_table_says_where_token_ids_differ(cli: Cli) -> None:
    train = train_side()
    train["responses"][3, 1] += 1
    save_tensors("rollout.safetensors", rollout_side())
    save_tensors("train.safetensors", train)
    out = cli("debug-compare", "rollout.safetensors", "train.safetensors").out
    assert "token ids: 1 of 9 differ, in 1 of 4 sequences\n" in out
    assert out.splitlines()[0].startswith("debug-compare  ")


@pytest.mark.parametrize("lacks", ["rollout", "train"])
def test_token_ids_of_either_file_name_the_worst_tokens(lacks: str, compare: Compare) -> None:
    sides = {"rollout": rollout_side(), "train": train_side()}
    sides[lacks] = without(sides[lacks], "responses")
    document = compare(sides["rollout"], sides["train"])
    right(document)
    assert "token_id_differences" not in document
    assert {token["token_id"] for token in document["worst_tokens"] if token["row"] == 1} == {100, 101}


# What does not fit


def refused(cli: Cli, rollout: dict[str, Any], train: dict[str, Any], first: str, *words: str) -> dict[str, str]:
    save_tensors("rollout.safetensors", rollout)
    save_tensors("train.safetensors", train)
    answer: Run = cli("debug-compare", "rollout.safetensors", "train.safetensors", *words)
    return answer.message(first)


def test_another_number_of_rows_is_refused(cli: Cli) -> None:
    message = refused(cli, rollout_side(), permuted(train_side(), [0, 1, 2]), "rollout.safetensors: it has 4 rows and ")
    assert message["what"].endswith("train.safetensors has 3")


def test_a_row_of_another_length_is_refused(cli: Cli) -> None:
    train = train_side()
    train["response_mask"][1, 1] = 0
    message = refused(cli, rollout_side(), train, "rollout.safetensors: 1 of rows 0..3 have another number of valid")
    assert (message["wanted"], message["found"]) == ("row 1: 2 valid tokens", "1")


def test_shuffled_rows_without_uid_do_not_fit_and_the_message_says_match_uid(cli: Cli) -> None:
    train = permuted(train_side(), [1, 0, 2, 3])
    message = refused(cli, rollout_side(), train, "rollout.safetensors: 2 of rows 0..3 have", "--match", "order")
    assert "--match uid" in message["do"]


@pytest.mark.parametrize(
    ("uid", "what"),
    [
        ([70, 80, 90, 61], "row 3 has uid 60, and train.safetensors has no row with it"),
        ([70, 80, 90, 70], "row 3 has uid 60, and train.safetensors has no row with it"),
        ([60, 60, 90, 80], "row 0 has uid 70, and train.safetensors has no row with it"),
    ],
)
def test_uids_that_do_not_match_are_refused(uid: list[int], what: str, cli: Cli) -> None:
    message = refused(cli, rollout_side(), train_side() | {"uid": torch.tensor(uid)}, f"rollout.safetensors: {what}")
    assert message["do"] == "--match order"


def test_a_uid_that_one_side_has_more_often_is_refused(cli: Cli) -> None:
    rollout = rollout_side() | {"uid": torch.tensor([70, 70, 90, 60])}
    assert refused(
        cli, rollout, train_side(), "rollout.safetensors: row 1 has uid 70, and train.safetensors has no further row"
    )


def test_match_uid_needs_uids_in_both(cli: Cli) -> None:
    message = refused(cli, rollout_side(), without(train_side(), "uid"), "train.safetensors: no uid", "--match", "uid")
    assert message["wanted"] == "uid in both files"
    assert refused(cli, without(rollout_side(), "uid"), train_side(), "rollout.safetensors: no uid", "--match", "uid")


def test_a_mask_is_not_lent_to_rows_of_another_width(cli: Cli) -> None:
    train = without(train_side(width=5), "response_mask")
    message = refused(cli, rollout_side(), train, "train.safetensors: no mask, and another width than the file that")
    assert (message["wanted"], message["found"]) == ("3 columns (rollout.safetensors)", "5")


def test_without_any_mask_every_position_counts_and_both_files_say_so(compare: Compare) -> None:
    rollout = {"rollout_log_probs": torch.tensor([[-1.0, -2.0]])}
    train = {"old_log_probs": torch.tensor([[-1.5, -2.5]])}
    document = compare(rollout, train)
    assert document["audited"]["log_ratio_mean"] == -0.5
    assert [note["text"] for note in document["notes"]] == [
        f"{side}.safetensors: no response_mask and no attention_mask: every position was counted, padding too"
        for side in ("rollout", "train")
    ]


def test_rank_files_are_compared_in_their_order(cli: Cli) -> None:
    for rank in (2, 10):
        order = list(range(4)) if rank == 2 else [3, 2, 1, 0]
        save_tensors(f"rollout/rank_{rank}.safetensors", permuted(rollout_side(), order))
        save_tensors(f"train/rank_{rank}.safetensors", train_side())
    document = cli("debug-compare", "rollout", "train", "--json").document
    assert [dump["path"] for dump in document["inputs"]] == [
        f"{side}/rank_{rank}.safetensors" for rank in (2, 10) for side in ("rollout", "train")
    ]
    assert document["audited"]["num_valid_tokens"] == 18
    assert document["audited"]["log_prob_diff_abs_max"] == 1.0
    worst = document["worst_tokens"][:2]
    assert [(token["path"], token["row"]) for token in worst] == [
        ("rollout/rank_10.safetensors", 1),
        ("rollout/rank_2.safetensors", 2),
    ]
    Path("train/rank_10.safetensors").unlink()
    message = cli("debug-compare", "rollout", "train").message("rollout/rank_2.safetensors: 2 files on the rollout")
    assert message["wanted"] == "the same number"
