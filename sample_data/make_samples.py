"""Make the sample dumps in this folder: real rollout/trainer log-prob pairs, and awkward files.

The dumps are shipped; nobody needs to run this to use them. It is how they were made. It wants a
folder that is not part of this repository, with engine.py (samples a small Llama with CTranslate2,
re-scores it with PyTorch), model/ and model_stale/ (the same network 60 optimiser steps earlier):

    pip install torch transformers ctranslate2 safetensors
    python make_samples.py --engine FOLDER               # rewrites the dumps beside this file
    python make_samples.py --engine FOLDER --out OTHER   # writes them elsewhere, to compare

On one machine the same versions give the same bytes. Another processor, or other versions, may
round differently and then sample other tokens. The numbers in README.md and expected.json belong
to the dumps that are shipped: write those again (README.md says how) if the dumps change.

Axes in names: B sequences, T padded positions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

HERE = Path(__file__).parent
THRESHOLD = 2.0
SAFETY_BOUND = 20.0

SAMPLED = {
    "engine": "ctranslate2",
    "temperature": "1.0",
    "top_p": "1.0",
    "top_k": "0",  # the whole vocabulary
    "logprobs_mode": "raw_logprobs",  # at these settings the processed ones would be the same
    "weight_version": "1",  # what the engine was given; model_stale/ would be version 0
}
EMPTY_ROWS = (2, 7, 8, 15)

Dump = dict[str, Tensor]


def write(path: Path, dump: Dump, metadata: dict[str, str]) -> None:
    """One safetensors file, its header in a fixed order (that of save() changes by the run)."""
    data = save(
        {name: tensor.contiguous() for name, tensor in dump.items()},
        metadata | {"made_by": "sample_data/make_samples.py"},
    )
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = dict(sorted(header.pop("__metadata__").items()))
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    path.chmod(0o644)


def rows(dump: Dump, first: int, num: int) -> Dump:
    """Some rows of a dump, cut to the longest of them."""
    width = int(dump["response_mask"][first : first + num].sum(-1).max())
    return {name: x_BT[first : first + num, :width] for name, x_BT in dump.items()}


def one_rank(engine: Any, converted: str, rank: int, max_len: int) -> Dump:
    """Eight prompts, four responses each, as GRPO draws them; a row's uid numbers its prompt."""
    sampled, rollout_log_probs = [], []
    for uid in range(8 * rank, 8 * rank + 8):
        prompt, seed = engine.PROMPTS[uid], 100 * (rank + 1) + uid % 8
        some, log_probs = engine.rollout(converted, 4, max_len, seed=seed, prompts=[prompt])
        sampled += some
        rollout_log_probs += log_probs
    train_log_probs = engine.trainer_log_probs(sampled, dtype=torch.bfloat16)
    dump = engine.pack(sampled, rollout_log_probs, train_log_probs)
    uid_B = torch.arange(8 * rank, 8 * rank + 8, dtype=torch.int64).repeat_interleave(4)
    return dump | {"uid": uid_B}


def without_tokens(dump: Dump, empty_rows: tuple[int, ...]) -> Dump:
    """The mask of these rows set to 0; their log-probs stay, as when a filter drops a response."""
    mask_BT = dump["response_mask"].clone()
    mask_BT[list(empty_rows)] = 0
    return dump | {"response_mask": mask_BT}


def only_weights(dump: Dump) -> Dump:
    """Token weights in the dump's own float32: raw, and truncated at THRESHOLD; 0 in padding."""
    log_ratio_BT = dump["old_log_probs"] - dump["rollout_log_probs"]
    raw_BT = log_ratio_BT.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp() * dump["response_mask"]
    return {
        "rollout_is_weights": raw_BT.clamp(max=THRESHOLD),
        "raw_rollout_is_weights": raw_BT,
        "response_mask": dump["response_mask"],
    }


def raw_fraction() -> Dump:
    """Two rows whose raw weights are 1, 6 and 0.9, 1.1, by hand (verl PR #6806).

    The raw mean of the first row is 3.5, above the threshold of 2; after truncation it is 1.5.
    rollout lies below -log 6, so that the train side is a log-prob too (at most -0.1).
    """
    raw_BT = torch.tensor([[1.0, 6.0], [0.9, 1.1]], dtype=torch.float64)
    below_BT = torch.tensor([[0.3, 0.1], [0.2, 0.4]], dtype=torch.float64)
    rollout_BT = -math.log(6.0) - below_BT
    return {
        "rollout_log_probs": rollout_BT,
        "old_log_probs": rollout_BT + raw_BT.log(),
        "response_mask": torch.ones(2, 2, dtype=torch.uint8),
        "responses": torch.tensor([[11, 12], [13, 14]], dtype=torch.int32),
    }


def make(engine: Any, folder: Path, out: Path) -> None:
    model, stale = folder / "model", folder / "model_stale"
    converted = engine.convert(model)
    sampled, rollout_log_probs = engine.rollout(converted, 64, 192, seed=0)

    def scored_by(weights: Path) -> Dump:
        train_log_probs = engine.trainer_log_probs(sampled, weights, dtype=torch.bfloat16)
        return engine.pack(sampled, rollout_log_probs, train_log_probs)

    healthy, stale_trainer = scored_by(model), scored_by(stale)
    write(out / "healthy.safetensors", healthy, SAMPLED)
    write(out / "stale_trainer.safetensors", stale_trainer, SAMPLED)

    of_int8, int8_log_probs = engine.rollout(engine.convert(model, "int8"), 64, 192, seed=1)
    int8_rollout = engine.pack(of_int8, int8_log_probs, engine.trainer_log_probs(of_int8))
    write(out / "int8_rollout.safetensors", int8_rollout, SAMPLED)

    for rank, max_len in enumerate((160, 128)):
        dump = one_rank(engine, converted, rank, max_len)
        metadata = SAMPLED | {"weight_version": "7", "step": "7", "rank": str(rank)}
        write(out / "step_7" / f"rank_{rank}.safetensors", dump, metadata)

    no_mask = rows(healthy, 0, 16)
    del no_mask["response_mask"]
    write(out / "no_mask.safetensors", no_mask, SAMPLED)
    empty_rows = without_tokens(rows(healthy, 16, 16), EMPTY_ROWS)
    write(out / "empty_rows.safetensors", empty_rows, SAMPLED)
    metadata = {key: value for key, value in SAMPLED.items() if key != "logprobs_mode"}
    weights_only = only_weights(rows(stale_trainer, 0, 16))
    write(out / "weights_only.safetensors", weights_only, metadata)
    write(out / "raw_fraction.safetensors", raw_fraction(), {})


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the sample dumps in this folder.")
    parser.add_argument("--engine", type=Path, required=True, help="folder with engine.py")
    parser.add_argument("--out", type=Path, default=HERE, help="where to write (default: here)")
    arguments = parser.parse_args()
    if not (arguments.engine / "engine.py").is_file():
        parser.error(f"--engine {arguments.engine}: no engine.py there")
    sys.path.insert(0, str(arguments.engine.resolve()))
    make(importlib.import_module("engine"), arguments.engine, arguments.out)
    for path in sorted(arguments.out.rglob("*.safetensors")):
        print(f"{path.stat().st_size:>9,} bytes  {path.relative_to(arguments.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
