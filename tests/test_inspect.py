"""inspect: what is in a file, which field is what, padding, lengths, odd values, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_audit import inspection
from rollout_audit.inspection import values_of
from rollout_audit.readers.fields import ALIASES
from rollout_audit.readers.safetensors_file import SafetensorsFile
from tests.conftest import IDS, MASK, NAN, OLD, ROLLOUT, Cli, Write, as_tensor, save_tensors

Inspect = Callable[..., dict[str, Any]]
INF = float("inf")


@pytest.fixture
def look(cli: Cli) -> Inspect:
    """inspect of one file, as its entry of `inputs`."""

    def call(path: Path, *words: str) -> dict[str, Any]:
        answer = cli("inspect", path, "--json", *words)
        assert answer.status == 0, answer
        (found,) = answer.document["inputs"]
        return dict(found)

    return call


def test_a_small_dump_is_described_in_full(write: Write, look: Inspect) -> None:
    found = look(write(metadata={"engine": "vllm", "step": "7"}))
    assert found["path"] == "dump.safetensors"
    assert found["metadata"] == {"engine": "vllm", "step": "7"}
    assert [(tensor["name"], tensor["dtype"], tensor["shape"]) for tensor in found["tensors"]] == [
        ("old_log_probs", "F32", [2, 3]),
        ("response_mask", "I64", [2, 3]),
        ("responses", "I64", [2, 3]),
        ("rollout_log_probs", "F32", [2, 3]),
    ]
    assert {(tensor["canonical"], tensor["why"]) for tensor in found["tensors"]} == {
        (tensor["name"], "its name") for tensor in found["tensors"]
    }
    assert found["rows"] == {
        "sequences": 2,
        "width": 3,
        "mask": "response_mask",
        "empty_sequences": 0,
        "valid_tokens": 5,
        "length_min": 2,
        "length_median": 2.5,
        "length_max": 3,
        "padding": ["right"],
        "values": {
            "rollout_log_probs": values(-3.0, -0.5, padding=1),
            "old_log_probs": values(-2.5, 0.0, padding=1),
        },
    }
    assert found["commands"] == {"is-metrics": "yes", "debug-compare": "yes"}
    assert found["notes"] == []


def values(low: float | None, high: float | None, valid: int = 0, padding: int = 0, **repeated: int) -> dict[str, Any]:
    return {
        "min": low,
        "max": high,
        "nonfinite_valid": valid,
        "nonfinite_padding": padding,
        "repeated_values": repeated,
    }


@pytest.mark.parametrize(
    ("mask", "padding"),
    [
        ([[1, 1, 1, 1]], ["none"]),
        ([[1, 1, 0, 0]], ["right"]),
        ([[0, 0, 1, 1]], ["left"]),
        ([[0, 1, 1, 0]], ["left", "right"]),
        ([[1, 0, 1, 1]], ["holes"]),
        ([[1, 0, 1, 0]], ["holes", "right"]),
        ([[0, 1, 0, 1]], ["holes", "left"]),
        ([[0, 0, 0, 0]], ["none"]),
        ([[0, 0, 0, 0], [1, 1, 1, 0]], ["right"]),
        ([[1, 1, 0, 0], [0, 0, 1, 1]], ["left", "right"]),
        ([[1, 1, 1, 1], [1, 0, 0, 1]], ["holes"]),
    ],
)
def test_padding_is_named_for_what_it_is(
    mask: list[list[int]], padding: list[str], look: Inspect, write: Write
) -> None:
    log_probs = torch.full((len(mask), 4), -1.0)
    path = write(old_log_probs=log_probs, rollout_log_probs=log_probs, response_mask=mask, responses=None)
    assert look(path)["rows"]["padding"] == padding


def test_lengths_leave_out_empty_rows(write: Write, look: Inspect) -> None:
    lengths = [4, 0, 1, 3, 0, 3]
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).to(torch.uint8)
    log_probs = torch.full((6, 4), -1.0)
    rows = look(write(old_log_probs=log_probs, rollout_log_probs=log_probs, response_mask=mask, responses=None))["rows"]
    assert (rows["sequences"], rows["empty_sequences"], rows["valid_tokens"]) == (6, 2, 11)
    assert (rows["length_min"], rows["length_median"], rows["length_max"]) == (1, 3.0, 4)


def test_lengths_of_no_row_are_null(write: Write, look: Inspect) -> None:
    rows = look(write(response_mask=[[0, 0, 0], [0, 0, 0]]))["rows"]
    assert (rows["length_min"], rows["length_median"], rows["length_max"]) == (None, None, None)
    # of no valid token there is no smallest value either; the NaN of padding is counted as such
    assert rows["values"]["old_log_probs"] == values(None, None, padding=1)


def test_values_that_are_not_finite_are_counted_apart_inside_and_outside_the_mask(write: Write, cli: Cli) -> None:
    path = write(
        rollout_log_probs=[[-1.0, INF, -3.0], [-0.5, NAN, -INF]],
        old_log_probs=[[NAN, -2.0, NAN], [-0.25, -INF, NAN]],
        response_mask=[[1, 1, 0], [1, 1, 0]],
    )
    document = cli("inspect", path, "--json").document
    found = document["inputs"][0]["rows"]["values"]
    assert found["rollout_log_probs"] == values(-1.0, -0.5, valid=2, padding=1)
    assert found["old_log_probs"] == values(-2.0, -0.25, valid=2, padding=2)
    assert document["audited"] == {
        "num_sequences": 2,
        "num_empty_sequences": 0,
        "num_valid_tokens": 4,
        "num_nonfinite_values": 4,
        "num_nonfinite_padding": 3,
    }
    assert document["denominators"]["num_nonfinite_values"] == {"count": 4, "of": "valid tokens"}
    assert document["denominators"]["num_nonfinite_padding"] == {"count": 2, "of": "positions of padding"}


def test_totals_are_over_all_files(write: Write, cli: Cli) -> None:
    write("run/a.safetensors")
    write("run/b.safetensors", response_mask=[[1, 0, 0], [0, 0, 0]])
    document = cli("inspect", "run", "--json").document
    assert [Path(found["path"]).name for found in document["inputs"]] == ["a.safetensors", "b.safetensors"]
    audited = document["audited"]
    assert (audited["num_sequences"], audited["num_empty_sequences"], audited["num_valid_tokens"]) == (4, 1, 6)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, -100.0, -9999.0])
def test_a_filler_that_is_common_among_valid_tokens_is_shown(value: float, write: Write, look: Inspect) -> None:
    """2 of 1,000 tokens, above the share of 0.1 %; of other values less than 1 % are no news."""
    log_probs = -2.0 - torch.arange(1000.0) / 1024
    log_probs[:2] = value
    log_probs[10:19] = -5.5
    log_probs = log_probs.reshape(2, 500)
    mask = torch.ones(2, 500, dtype=torch.int64)
    path = write(old_log_probs=log_probs, rollout_log_probs=log_probs, response_mask=mask, responses=None)
    assert look(path)["rows"]["values"]["old_log_probs"]["repeated_values"] == {f"{value:g}": 2}


def test_any_value_that_recurs_often_is_shown_but_not_what_stands_in_padding(write: Write, look: Inspect) -> None:
    log_probs = -2.0 - torch.arange(1000.0) / 1024
    log_probs[10:25] = -11.5129
    log_probs[500:] = 0.0
    log_probs = log_probs.reshape(2, 500)
    mask = torch.tensor([[1] * 500, [0] * 500])
    path = write(old_log_probs=log_probs, rollout_log_probs=log_probs, response_mask=mask, responses=None)
    assert look(path)["rows"]["values"]["rollout_log_probs"]["repeated_values"] == {"-11.5129": 15}


def test_a_value_that_recurs_is_found_whatever_the_block(
    write: Write, look: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_BLOCK_TOKENS", 200)
    log_probs = -2.0 - torch.arange(1000.0).reshape(10, 100) / 1024
    log_probs[:, 7] = -100.0
    mask = torch.ones(10, 100, dtype=torch.bool)
    mask[0:2] = False  # the first block has no valid token
    path = write(old_log_probs=log_probs, rollout_log_probs=log_probs, response_mask=mask, responses=None)
    rows = look(path)["rows"]
    assert rows["values"]["old_log_probs"]["repeated_values"] == {"-100": 8}
    assert (rows["valid_tokens"], rows["empty_sequences"], rows["padding"]) == (800, 2, ["none"])


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float16, "F16"), (torch.bfloat16, "BF16"), (torch.float32, "F32"), (torch.float64, "F64")],
)
def test_every_float_is_read(dtype: torch.dtype, name: str, write: Write, look: Inspect) -> None:
    old = torch.tensor([[-0.5, -1.5, -65504.0], [-0.0078125, -INF, NAN]]).to(dtype)
    found = look(write(old_log_probs=old))
    assert found["tensors"][0]["dtype"] == name
    low = -65536.0 if name == "BF16" else -65504.0  # the largest half; bf16 keeps 8 bits of it
    assert found["rows"]["values"]["old_log_probs"] == values(low, -0.0078125, valid=1, padding=1)


@pytest.mark.parametrize(
    "dtype",
    [
        *[torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64],
        *[torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ],
)
def test_a_mask_of_any_type_is_read_as_the_commands_read_it(
    dtype: torch.dtype, write: Write, look: Inspect, cli: Cli
) -> None:
    path = write(response_mask=torch.tensor(MASK).to(dtype))
    found = look(path)
    assert (found["rows"]["mask"], found["rows"]["valid_tokens"], found["notes"]) == ("response_mask", 5, [])
    assert found["commands"]["is-metrics"] == "yes"
    assert cli("is-metrics", path, "--json").document["audited"]["num_valid_tokens"] == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numpy_and_torch_read_the_same_values(dtype: torch.dtype, write: Write, cli: Cli) -> None:
    """Any bits, signalling NaN among them."""
    bits = np.random.default_rng(3).integers(0, 256, (40, 50 * dtype.itemsize), np.uint8)
    old = torch.from_numpy(bits).view(dtype)
    mask = torch.ones(40, 50, dtype=torch.int8)
    path = write(old_log_probs=old, rollout_log_probs=old, response_mask=mask, responses=None)
    found = cli("inspect", path, "--json").document["inputs"][0]["rows"]["values"]["old_log_probs"]
    finite = old[torch.isfinite(old)].double()
    assert found["nonfinite_valid"] == 2000 - finite.numel() > 0
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    file = SafetensorsFile(str(path))
    read = values_of(file, file.tensors["old_log_probs"], 10, 30)
    np.testing.assert_array_equal(read, old[10:30].float().numpy())


def test_mask_values_other_than_0_and_1_are_counted(write: Write, look: Inspect) -> None:
    found = look(write(response_mask=[[1.0, 0.5, 2.0], [1.0, 0.0, NAN]]))
    assert found["notes"] == ["3 mask values are neither 0 nor 1"]
    assert found["rows"]["valid_tokens"] == 5


def test_without_a_mask_every_token_counts(write: Write, look: Inspect) -> None:
    found = look(write(response_mask=None))
    assert (found["rows"]["mask"], found["rows"]["valid_tokens"], found["rows"]["padding"]) == (None, 6, ["none"])
    assert found["commands"] == {
        "is-metrics": "no: response_mask missing (--all-tokens counts padding too)",
        "debug-compare": "yes, over all tokens: there is no mask",
    }


def test_of_a_mask_over_prompt_and_response_the_last_columns_count(write: Write, look: Inspect) -> None:
    found = look(write(response_mask=None, attention_mask=[[1, 1, 1, 1, 0], [0, 1, 1, 0, 0]]))
    assert (found["rows"]["mask"], found["rows"]["valid_tokens"]) == ("attention_mask", 2 + 1)


def test_a_mask_that_does_not_fit_is_not_used(write: Write, look: Inspect) -> None:
    found = look(write(response_mask=[[1, 1], [1, 0]]))
    assert found["notes"] == ["response_mask [2, 2] I64 does not fit 2 rows of 3: not used"]
    assert (found["rows"]["mask"], found["rows"]["valid_tokens"]) == (None, 6)


@pytest.mark.parametrize(
    ("canonical", "alias"), [(canonical, alias) for canonical, names in ALIASES.items() for alias in names[1:]]
)
def test_a_name_of_another_framework_is_taken_for_the_field_it_is(
    canonical: str, alias: str, write: Write, look: Inspect
) -> None:
    tensors = {"rollout_is_weights": as_tensor(OLD), canonical: None}
    if canonical in ("rollout_log_probs", "old_log_probs", "response_mask", "responses"):
        value = {"rollout_log_probs": ROLLOUT, "old_log_probs": OLD, "response_mask": MASK, "responses": IDS}[canonical]
        tensors = {canonical: None}
    else:
        value = OLD
    found = look(write(**tensors, **{alias: value}))
    (tensor,) = [tensor for tensor in found["tensors"] if tensor["name"] == alias]
    assert (tensor["canonical"], tensor["why"]) == (canonical, f"another name of {canonical}")


def test_a_name_nobody_knows_is_no_field_until_it_is_said(write: Write, look: Inspect) -> None:
    path = write(old_log_probs=None, logits_sum=OLD)
    (tensor,) = [tensor for tensor in look(path)["tensors"] if tensor["name"] == "logits_sum"]
    assert (tensor["canonical"], tensor["why"]) == (None, None)
    assert look(path)["commands"]["is-metrics"] == "no: old_log_probs missing"
    found = look(path, "--field", "old_log_probs=logits_sum")
    (tensor,) = [tensor for tensor in found["tensors"] if tensor["name"] == "logits_sum"]
    assert (tensor["canonical"], tensor["why"]) == ("old_log_probs", "--field")
    assert found["commands"]["is-metrics"] == "yes"
    assert found["rows"]["values"]["old_log_probs"] == values(-2.5, 0.0, padding=1)


def test_two_candidates_and_a_field_that_is_not_there_are_doubts(write: Write, look: Inspect) -> None:
    found = look(write(loss_mask=MASK))
    assert found["notes"] == [
        "several tensors could be response_mask; response_mask, loss_mask; say which: "
        "--field response_mask=response_mask"
    ]
    unclear = "no: which tensor is response_mask is not clear (--field)"
    assert found["commands"] == {"is-metrics": unclear, "debug-compare": unclear}
    found = look(write(), "--field", "old_log_probs=nothing")
    assert found["notes"][0].startswith("no tensor 'nothing'; old_log_probs, response_mask, ")
    assert found["commands"]["is-metrics"] == "no: which tensor is old_log_probs is not clear (--field)"


def test_tensors_that_are_not_rows_of_tokens_are_listed_but_not_read(write: Write, look: Inspect) -> None:
    found = look(write(old_log_probs=[-1.0], rollout_log_probs=[-1.0], response_mask=[1], responses=None))
    assert found["rows"] is None
    assert found["notes"] == ["shape [1] is not [sequences, tokens]: values were not looked at"]
    assert found["commands"]["is-metrics"] == "no: rollout_log_probs has shape [1], not [sequences, tokens]"
    found = look(save_tensors("model.safetensors", {"lm_head": torch.ones(2, 2), "norm": torch.ones(())}))
    assert found["rows"] is None
    assert [tensor["shape"] for tensor in found["tensors"]] == [[2, 2], []]
    assert found["commands"]["is-metrics"] == "no: rollout_log_probs and old_log_probs missing"


DUMPS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no mask": {"response_mask": None},
    "attention mask": {"response_mask": None, "attention_mask": [[1] * 5] * 2},
    "short attention mask": {"response_mask": None, "attention_mask": [[1] * 2] * 2},
    "wide mask": {"response_mask": [[1] * 5] * 2},
    "narrow mask": {"response_mask": [[1] * 2] * 2},
    "mask of other rows": {"response_mask": [[1] * 3]},
    "mask of one axis": {"response_mask": [1, 1]},
    "complex mask": {"response_mask": torch.ones(2, 3, dtype=torch.complex64)},
    "bf16 mask": {"response_mask": torch.ones(2, 3, dtype=torch.bfloat16)},
    "two masks": {"loss_mask": MASK},
    "two rollouts": {"generation_logprobs": ROLLOUT},
    "no rollout": {"rollout_log_probs": None},
    "no train": {"old_log_probs": None},
    "neither": {"rollout_log_probs": None, "old_log_probs": None},
    "neither, and no mask": {"rollout_log_probs": None, "old_log_probs": None, "response_mask": None},
    "weights": {"rollout_log_probs": None, "old_log_probs": None, "rollout_is_weights": OLD},
    "raw weights": {"rollout_log_probs": None, "old_log_probs": None, "raw_rollout_is_weights": OLD},
    "weights and train": {"rollout_log_probs": None, "rollout_is_weights": OLD},
    "weights and rollout": {"old_log_probs": None, "rollout_is_weights": OLD},
    "weights of whole numbers": {"rollout_is_weights": MASK},
    "weights of another shape": {"rollout_is_weights": [[1.0]]},
    "whole numbers": {"old_log_probs": IDS},
    "float8": {"old_log_probs": torch.ones(2, 3).to(torch.float8_e4m3fn)},
    "another width": {"old_log_probs": [[-1.0, -2.0]] * 2},
    "one axis": {"old_log_probs": [-1.0, -2.0]},
    "three axes": {"rollout_log_probs": [ROLLOUT]},
    "ids of another width": {"responses": [[1, 2]] * 2},
    "ids of one axis": {"responses": [1, 2]},
    "complex ids": {"responses": torch.ones(2, 3, dtype=torch.complex64)},
}


@pytest.mark.parametrize("changes", DUMPS.values(), ids=DUMPS)
def test_what_inspect_says_can_be_done_can_be_done(
    changes: dict[str, Any], write: Write, look: Inspect, cli: Cli
) -> None:
    path = write(**changes)
    for command, said in look(path)["commands"].items():
        status = cli(command, path, "--quiet").status
        assert status == (2 if said.startswith("no: ") else 0), (command, said)


def test_the_table_shows_what_the_document_holds(write: Write, cli: Cli) -> None:
    path = write(
        old_log_probs=[[NAN, -1.5, -2.5], [0.0, 0.0, 0.0]],
        response_mask=None,
        loss_mask=[[1, 1, 1], [1, 1, 0]],
        metadata={"engine": "vllm", "step": "7"},
        extra=[1.0],
    )
    answer = cli("inspect", path)
    assert answer.err == ""
    out = answer.out
    assert out.startswith("dump.safetensors\n")
    assert " loss_mask           I64     2 x 3   response_mask       another name of response_mask\n" in out
    assert " extra               F32     1       —\n" in out
    assert "header: engine=vllm, step=7\n" in out
    assert "rows: 2 sequences of 3, 0 empty; mask: loss_mask\n" in out
    assert "lengths (min / median / max): 2 / 2.5 / 3; padding: right; 5 valid tokens\n" in out
    assert "old_log_probs: -2.5 to 0; NaN or infinite: 1 valid, 0 in padding; recurring values: 0 2 times\n" in out
    assert "is-metrics: yes\ndebug-compare: yes\n" in out


def test_a_weights_only_dump_says_what_it_is_good_for(write: Write, look: Inspect) -> None:
    weights = {"rollout_log_probs": None, "old_log_probs": None, "rollout_is_weights": [[1.0, 2.0, 0.5]] * 2}
    said = look(write(**weights))["commands"]["is-metrics"]
    assert said == "weights only: no log-probs of both sides; high and low fractions need raw_rollout_is_weights"
    both = look(write(**weights, raw_rollout_is_weights=[[1.0, 3.0, 0.5]] * 2))
    assert both["commands"]["is-metrics"] == "weights only: no log-probs of both sides"
    assert both["rows"]["values"]["raw_rollout_is_weights"]["max"] == 3.0
    assert look(write(rollout_log_probs=None))["commands"]["is-metrics"] == (
        "train-side perplexity only: rollout_log_probs missing"
    )


def test_the_device_is_accepted_and_not_used(write: Write, cli: Cli) -> None:
    document = cli("inspect", write(), "--json", "--device", "cuda:3").document
    assert document["settings"] == {"device": "cuda:3", "field": []}
