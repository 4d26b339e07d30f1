"""Regenerate verl/expected.json: what the real verl computes on the dumps beside it.

    pip install torch==2.13.0 safetensors    # first, so that a torch already there is kept
    pip install verl==0.9.1 torch==2.13.0    # pure Python; no GPU needed
    python make_goldens.py                   # rewrite verl/expected.json
    python make_goldens.py --check           # compare with it instead; exit 1 if anything differs

Each dump gives 24 cases: 23 settings of `compute_rollout_correction_and_rejection_mask` (is-metrics)
and one of `calculate_debug_metrics` (debug-compare). An is-metrics case stores verl's metrics,
`kept_tokens` (tokens whose modified mask is non-zero) and, where verl returns importance weights,
`weight_sum` (the sum of the whole padded tensor).

Precision: both log-probs are cast to float64 before verl sees them, whatever the dump stores; the mask
keeps its own dtype. Computed on the CPU. Finite numbers are written in full, non-finite ones as their Python
repr, a string. --check compares at relative 1e-12: another CPU may add up a sum in another order.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.debug.metrics import calculate_debug_metrics

VERL = Path(__file__).parent / "verl"
EXPECTED = VERL / "expected.json"
REL_TOL = 1e-12

DUMPS = (
    "ragged",
    "wide_mismatch",
    "empty_row",
    "single_token",
    "single_token_wide",
    "bool_mask",
    "float_mask",
    "holes_in_mask",
    "nan_outside_mask",
    "extreme_ratio",
    "bf16",
    "fp16",
    "fp64",
    "identical",
    "seq_drift",
    "larger",
    "raw_fraction",
)

WEIGHTS: list[dict[str, Any]] = [
    {"rollout_is": "token", "rollout_is_threshold": 2.0},
    {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
    {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True},
    {"rollout_is": None},
]

REJECTIONS = {
    "token_k1": ("0.6_1.6", "1.3"),
    "token_k2": ("0.02",),
    "token_k3": ("0.02",),
    "seq_sum_k1": ("0.5_2.0",),
    "seq_sum_k2": ("0.3",),
    "seq_sum_k3": ("0.3",),
    "seq_mean_k1": ("0.99_1.01",),
    "seq_mean_k2": ("0.01",),
    "seq_mean_k3": ("0.01",),
    "seq_max_k2": ("0.05",),
    "seq_max_k3": ("0.05",),
    "token_k1,seq_max_k3": ("0.5_2.0,0.1",),
    "seq_mean_k1,token_k3,seq_sum_k2": ("0.98_1.02,0.05,0.5",),
    "token_k2,token_k3": ("0.03",),
}

BOTH: dict[str, Any] = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "token_k1,seq_max_k3",
    "rollout_rs_threshold": "0.5_2.0,0.1",
}

SETTINGS: list[dict[str, Any]] = [
    *WEIGHTS,
    *(
        {"rollout_is": None, "rollout_rs": options, "rollout_rs_threshold": threshold}
        for options, thresholds in REJECTIONS.items()
        for threshold in thresholds
    ),
    BOTH,
]


def load(name: str) -> dict[str, torch.Tensor]:
    """The dump's tensors, log-probs as float64 and the mask as stored."""
    dump = load_file(VERL / name)
    for key in ("old_log_probs", "rollout_log_probs"):
        dump[key] = dump[key].double()
    return dump


def json_number(value: float) -> float | str:
    """JSON has no NaN and no infinity: those become Python's repr of them."""
    return value if math.isfinite(value) else repr(value)


def is_metrics(dump: dict[str, torch.Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        dump["old_log_probs"], dump["rollout_log_probs"], dump["response_mask"], **settings
    )
    result: dict[str, Any] = {
        "metrics": {key: json_number(value) for key, value in metrics.items()},
        "kept_tokens": int(torch.count_nonzero(mask)),
    }
    if weights is not None:
        result["weight_sum"] = json_number(weights.batch["rollout_is_weights"].sum().item())
    return result


def debug_compare(dump: dict[str, torch.Tensor]) -> dict[str, Any]:
    metrics = calculate_debug_metrics(DataProto.from_dict(tensors=dump))
    return {"metrics": {key: json_number(value) for key, value in metrics.items()}}


def regenerate() -> dict[str, Any]:
    """All cases, in the order of expected.json."""
    cases: list[dict[str, Any]] = []
    for stem in DUMPS:
        name = f"{stem}.safetensors"
        dump = load(name)
        cases += [
            {"dump": name, "command": "is-metrics", "settings": settings} | is_metrics(dump, settings)
            for settings in SETTINGS
        ]
        cases.append({"dump": name, "command": "debug-compare", "settings": {}} | debug_compare(dump))
    source = f"verl {version('verl')}, inputs cast to float64; non-finite values written as Python repr strings"
    return {"source": source, "cases": cases}


def differences(got: Any, want: Any, where: str = "") -> list[str]:
    """One line for each place where the two trees differ; finite floats may differ by REL_TOL."""
    if isinstance(got, dict) and isinstance(want, dict):
        if list(got) != list(want):
            return [f"{where}: keys {list(got)}, stored {list(want)}"]
        return [line for key in want for line in differences(got[key], want[key], f"{where} {key}")]
    if isinstance(got, float) and isinstance(want, float):
        same = math.isclose(got, want, rel_tol=REL_TOL, abs_tol=0.0)
    else:
        same = type(got) is type(want) and got == want
    return [] if same else [f"{where}: {got!r}, stored {want!r}"]


def check(got: dict[str, Any], want: dict[str, Any]) -> int:
    """Print what differs; 1 if anything does."""
    lines = differences(got["source"], want["source"], "source")
    got_num, want_num = len(got["cases"]), len(want["cases"])
    if got_num != want_num:
        lines.append(f"cases: {got_num}, stored {want_num}")
    num_equal = 0
    for number, (case, stored) in enumerate(zip(got["cases"], want["cases"], strict=False)):
        found = differences(case, stored, f"case {number} ({case['dump']}, {case['command']})")
        num_equal += not found
        lines += found
    for line in lines:
        print(line, file=sys.stderr)
    print(f"{num_equal} of {want_num} stored cases equal at relative {REL_TOL}")
    return 1 if lines else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Regenerate verl/expected.json with the real verl.")
    parser.add_argument("--check", action="store_true", help="compare with expected.json, do not write")
    arguments = parser.parse_args()
    if {path.stem for path in VERL.glob("*.safetensors")} != set(DUMPS):
        parser.error(f"the dumps in {VERL} are not those listed in DUMPS")
    got = regenerate()
    if arguments.check:
        return check(got, json.loads(EXPECTED.read_text()))
    EXPECTED.write_text(json.dumps(got, indent=1))
    print(f"wrote {len(got['cases'])} cases to {EXPECTED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
