"""All 408 stored results of verl 0.9.1 come out again, through the API and through the command line's own path."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rollout_audit

VERL = Path(__file__).parent / "goldens" / "verl"
CASES: list[dict[str, Any]] = json.loads((VERL / "expected.json").read_text())["cases"]


def case_id(case: dict[str, Any]) -> str:
    settings = case["settings"]
    words = [str(value) for value in settings.values() if value is not None]
    return "-".join([case["dump"].removesuffix(".safetensors"), case["command"], *words])


def close(got: float | None, expected: float | str | None) -> bool:
    want = math.nan if expected is None else float(expected)
    if got is None or not math.isfinite(got):
        return not math.isfinite(want) and (got is None or repr(got) == repr(want))
    return math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-10)


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(got) == list(expected)
    wrong = {key: (got[key], expected[key]) for key in expected if not close(got[key], expected[key])}
    assert not wrong


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_api_gives_what_verl_gave(case: dict[str, Any]) -> None:
    dump = load_file(VERL / case["dump"])
    for name in ("old_log_probs", "rollout_log_probs"):
        dump[name] = dump[name].double()
    if case["command"] == "debug-compare":
        assert_same(rollout_audit.calculate_debug_metrics(dump), case["metrics"])
        return
    weights, mask, metrics = rollout_audit.compute_rollout_correction_and_rejection_mask(
        dump["old_log_probs"], dump["rollout_log_probs"], dump["response_mask"], **case["settings"]
    )
    assert_same(metrics, case["metrics"])
    assert int(torch.count_nonzero(mask)) == case["kept_tokens"]
    assert mask.dtype == dump["response_mask"].dtype
    if "weight_sum" in case:
        assert weights is not None
        assert close(float(weights.sum()), case["weight_sum"])
    else:
        assert weights is None
