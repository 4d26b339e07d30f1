"""The JSON Schema that ships with the package, and real documents held to it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch

from tests.conftest import IDS, MASK, NAN, OLD, ROLLOUT, Cli, Run, Write, as_tensor, save_tensors

VERL = Path(__file__).parent / "goldens" / "verl"
DUMPS = sorted(path.name for path in VERL.glob("*.safetensors"))
SCHEMA: dict[str, Any] = json.loads((resources.files("rollout_audit") / "schema" / "report.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

EVERY_RULE = (
    "token_k1,token_k2,token_k3,seq_sum_k1,seq_sum_k2,seq_sum_k3,seq_mean_k1,seq_mean_k2,seq_mean_k3,"
    "seq_max_k2,seq_max_k3"
)
SETTINGS: dict[str, list[str]] = {
    "is-metrics": ["is-metrics"],
    "sequence": ["is-metrics", "--rollout-is", "sequence", "--rollout-is-batch-normalize"],
    "icepop": ["is-metrics", "--rollout-is-threshold", "0.5_5.0", "--verl-before-6806", "--all-tokens"],
    "preset": ["is-metrics", "--preset", "decoupled_seq_is_rs", "--fail-if", "kl > 1", "--fail-if", "no_such > 1"],
    "every rule": ["is-metrics", "--rollout-is", "none", "--rollout-rs", EVERY_RULE, "--rollout-rs-threshold", "1.01"],
    "nothing kept": ["is-metrics", "--rollout-rs", "token_k3", "--rollout-rs-threshold", "1e-300"],
    "all weights 0": ["is-metrics", "--rollout-is-threshold", "1e-300"],
    "debug-compare": ["debug-compare", "--fail-if", "rollout_probs_diff_max > 2"],
    "no worst token": ["debug-compare", "--top", "0"],
    "diagnose": ["diagnose", "--fail-if", "log_prob_diff_abs_mean > 1e9"],
    "diagnose, other bands": ["diagnose", "--expect", "moe"],
    "inspect": ["inspect", "--field", "responses=responses", "--fail-if", "num_nonfinite_values > 0"],
}


def check(answer: Run) -> dict[str, Any]:
    """The document, held to the schema and to what a schema cannot say."""
    document = answer.document
    errors = [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(document)]
    assert not errors
    assert list(document["denominators"]) == list(document["audited"])
    values = document["metrics"] | {f"audited/{key}": value for key, value in document["audited"].items()}
    nulls = {key for key, value in values.items() if value is None}
    named = Counter(key for note in document["notes"] for key in note["about"])
    assert nulls == set(named), "each null has a reason, and no reason is without its null"
    assert set(named.values()) <= {1}, "one reason each"
    return document


def subschemas(schema: object, place: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        yield place, schema
        for key, value in schema.items():
            yield from subschemas(value, f"{place}/{key}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from subschemas(value, f"{place}/{index}")


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert SCHEMA["properties"]["schema_version"]["const"] == 1


def test_every_key_is_described_and_no_other_is_allowed() -> None:
    for place, schema in subschemas(SCHEMA):
        if "description" not in schema or not isinstance(schema.get("properties"), dict):
            continue
        assert "additionalProperties" in schema, place
        for key, value in schema["properties"].items():
            target = SCHEMA["$defs"][value["$ref"].rsplit("/", 1)[-1]] if "$ref" in value else value
            assert target["description"][-1] in ".:", f"{place}/{key}"
            assert "required" not in schema or key in schema["required"] or key in OPTIONAL, f"{place}/{key}"


OPTIONAL = {
    "verdict",
    "bands",
    "remaining_abs_log_ratio",
    "looked_at",
    "unsure",
    "worst_tokens",
    "token_id_differences",
    "match",
    "side",
    "step",
    "file",
}


def test_every_definition_is_used() -> None:
    used = {schema["$ref"] for _, schema in subschemas(SCHEMA) if isinstance(schema.get("$ref"), str)}
    assert used == {f"#/$defs/{name}" for name in SCHEMA["$defs"]}


@pytest.mark.parametrize("words", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dump", DUMPS)
def test_every_golden_dump_gives_a_document_of_the_schema(dump: str, words: list[str], cli: Cli) -> None:
    command, *options = words
    answer = cli(command, VERL / dump, *options, "--json")
    assert answer.status == (1 if "no_such > 1" in words else 0)
    document = check(answer)
    assert document["command"] == command
    assert len(document["gates"]) == words.count("--fail-if")


BROKEN: dict[str, dict[str, Any]] = {
    "a NaN": {"old_log_probs": [[NAN, -1.0, -2.0], [-3.0, -4.0, 0.0]]},
    "all NaN": {"old_log_probs": [[NAN] * 3, [NAN] * 3]},
    "both -inf": {"old_log_probs": [[-float("inf")] * 3, OLD[1]], "rollout_log_probs": [[-float("inf")] * 3, OLD[1]]},
    "inf": {"rollout_log_probs": [[float("inf"), -1.0, -2.0], [-3.0, -4.0, 0.0]]},
    "a signalling NaN": {"old_log_probs": torch.tensor([[0x7F800001, 1, 2], [3, 4, 5]]).int().view(torch.float32)},
    "enormous": {"old_log_probs": [[-1e30] * 3] * 2, "rollout_log_probs": [[1e30] * 3] * 2},
    "far apart": {"old_log_probs": [[-1.0] * 3] * 2, "rollout_log_probs": [[-10_000.0] * 3] * 2},
    "far apart the other way": {"old_log_probs": [[-10_000.0] * 3] * 2, "rollout_log_probs": [[-1.0] * 3] * 2},
    "constant": {"old_log_probs": [[-1.0] * 3] * 2, "rollout_log_probs": [[-1.0] * 3] * 2},
    "positive": {"old_log_probs": [[0.5] * 3] * 2},
    "one token": {"response_mask": [[0, 1, 0], [0, 0, 0]]},
    "one row": {"response_mask": [[1, 1, 1], [0, 0, 0]]},
    "no token": {"response_mask": [[0, 0, 0], [0, 0, 0]]},
    "weighted mask": {"response_mask": [[1.0, 0.5, 2.0], [1.0, 0.0, 1.0]]},
    "no rollout": {"rollout_log_probs": None},
    "weights only": {"rollout_log_probs": None, "old_log_probs": None, "rollout_is_weights": [[1.0, 2.0, 0.5]] * 2},
    "zero weights": {
        "rollout_log_probs": None,
        "old_log_probs": None,
        "rollout_is_weights": [[0.0] * 3] * 2,
        "raw_rollout_is_weights": [[0.0] * 3] * 2,
    },
    "NaN weights": {"rollout_log_probs": None, "old_log_probs": None, "rollout_is_weights": [[NAN] * 3] * 2},
    "weights that disagree": {"rollout_is_weights": [[9.0] * 3] * 2, "raw_rollout_is_weights": [[9.0] * 3] * 2},
    "no responses": {"responses": None},
    "other names": {"response_mask": None, "loss_mask": MASK},
    "two masks": {"loss_mask": MASK},
    "flat": {"old_log_probs": [-1.0], "rollout_log_probs": [-1.0], "response_mask": [1], "responses": [1]},
}


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN)
def test_odd_dumps_give_documents_of_the_schema_too(changes: dict[str, Any], write: Write, cli: Cli) -> None:
    path = write(metadata={"engine": "vllm 0.11"}, **changes)
    checked = 0
    for words in SETTINGS.values():
        answer = cli(words[0], path, *words[1:], "--json")
        if answer.status == 2:
            assert answer.message("")
        else:
            check(answer)
            checked += 1
    assert checked, "inspect, at least, answers"


def test_both_infinities_in_one_row_give_no_warning(write: Write, cli: Cli) -> None:
    path = write(old_log_probs=[[float("inf"), -float("inf"), -1.0], OLD[1]])
    assert cli("is-metrics", path, "--json").status == 0


def test_log_probs_at_the_end_of_float64_are_answered(write: Write, cli: Cli) -> None:
    far = torch.tensor([[1e307, 2e307, 3e307]] * 2, dtype=torch.float64)
    check(cli("debug-compare", write(old_log_probs=-far, rollout_log_probs=far), "--json"))


def test_a_weighted_mask_with_nothing_finite_gives_reasons_too(write: Write, cli: Cli) -> None:
    path = write(old_log_probs=[[NAN] * 3] * 2, response_mask=[[1.0, 0.5, 2.0], [1.0, 0.0, 1.0]])
    check(cli("is-metrics", path, "--json"))


def test_two_files_give_a_document_of_the_schema(write: Write, cli: Cli) -> None:
    write("train.safetensors", responses=[[11, 99, 98], [21, 22, 0]], uid=[1, 2], rollout_log_probs=None)
    write("rollout.safetensors", uid=[1, 2], old_log_probs=None)
    document = check(cli("debug-compare", "rollout.safetensors", "train.safetensors", "--json"))
    assert document["settings"] == {"top": 10, "device": "cpu", "match": "uid"}
    assert document["token_id_differences"] == {
        "differing_tokens": 2,
        "tokens": 5,
        "differing_sequences": 1,
        "sequences": 2,
        "worst_sequences": [{"path": "rollout.safetensors", "row": 0, "differing": 2, "first_position": 1}],
    }
    assert len(document["worst_tokens"]) == 5
    save_tensors("mask_less.safetensors", {"rollout_log_probs": as_tensor(ROLLOUT)})
    document = check(cli("debug-compare", "mask_less.safetensors", "train.safetensors", "--json"))
    assert document["inputs"][0]["mask"] == "response_mask of train.safetensors"


def test_what_is_not_of_the_schema_is_refused(write: Write, cli: Cli) -> None:
    """The schema is strict enough to see each of these, once, in a document that was right."""
    right = check(cli("debug-compare", write(), "--json", "--fail-if", "kl > 1"))
    wrong: list[tuple[list[str | int], Any]] = [
        (["schema_version"], 2),
        (["schema_version"], "1"),
        (["command"], "diagnose"),
        (["extra"], {}),
        (["inputs"], []),
        (["inputs", 0, "valid_tokens"], -1),
        (["inputs", 0, "valid_tokens"], 5.5),
        (["inputs", 0, "mask"], "loss_mask"),
        (["inputs", 0, "metadata"], {"step": 7}),
        (["inputs", 0, "fields", "mask"], {"name": "m", "dtype": "U8", "shape": [2, 3]}),
        (["settings", "rollout_is"], "token"),
        (["metrics", "training/rollout_probs_diff_max"], "NaN"),
        (["metrics", "training/rollout_probs_diff_max"], True),
        (["metrics", "without_prefix"], 1.0),
        (["audited", "log_ratio_mean"], "0.5"),
        (["audited", "with/prefix"], 1.0),
        (["denominators", "log_ratio_mean"], {"count": 5}),
        (["denominators", "log_ratio_mean"], {"count": None, "of": "valid tokens"}),
        (["findings"], [{"code": "x", "severity": "fatal", "summary": "", "evidence": {}, "where": [], "remedy": ""}]),
        (["gates", 0, "failed"], False),
        (["gates", 0, "value"], "null"),
        (["notes"], [{"text": "", "about": []}]),
        (["notes"], [{"text": "why", "about": ["a key"]}]),
        (["worst_tokens", 0, "row"], -1),
        (["worst_tokens", 0, "rank"], 1),
        (["token_id_differences"], {"differing_tokens": 1}),
    ]
    for path, value in wrong:
        document = json.loads(json.dumps(right))
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        assert not VALIDATOR.is_valid(document), path
    for key in right:
        assert not VALIDATOR.is_valid({name: value for name, value in right.items() if name != key}), key
    assert IDS[0][0] == right["worst_tokens"][0]["token_id"]
