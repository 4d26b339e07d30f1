"""Write a labelled set: faulty and healthy dumps of small simulated models, and a manifest that says which is which.

    python benchmarks/faults/make.py DIR [--seed 1] [--rounds 3]
    python benchmarks/faults/score.py DIR

Vocabulary (256 to 1,024), certainty, noise, rows (12 to 150), lengths (1 to 2,000) and strengths vary by the seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.simulated import PLAIN, Batch, Model, Sampler, sampled  # noqa: E402

SHAPES = ((48, 120), (24, 300), (150, 60), (96, 200), (16, 700))


class Set:
    """A folder of dumps under a manifest."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, np.random.default_rng(seed)
        self.entries: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, batch: Batch, label: str | list[str], variant: str, strength: str = "", also: str = "") -> None:
        labels = [label] if isinstance(label, str) and label else list(label)
        name = f"{len(self.entries):04}_{'_'.join(labels) or 'healthy'}.safetensors"
        tensors = batch.tensors
        save_file({key: x.contiguous() for key, x in tensors.items()}, self.folder / name)
        difference = (tensors["old_log_probs"] - tensors["rollout_log_probs"])[tensors["response_mask"].bool()]
        difference = difference[torch.isfinite(difference)]
        entry = {
            "file": name,
            "labels": labels,
            "variant": variant,
            "strength": strength,
            "rows": len(batch.lengths),
            "tokens": int(batch.lengths.sum()),
            "mean_abs_d": float(difference.abs().mean()),
            "also_allowed": also.split(),
        }
        self.entries.append(entry)

    def draw(self, **changes: Any) -> tuple[Model, dict[str, Any]]:
        """A model, and the size and noise of a batch of it."""
        rows, width = SHAPES[self.random.integers(len(SHAPES))]
        model = Model.random(
            int(self.random.integers(1e9)),
            int(self.random.choice([256, 512, 1024])),
            float(self.random.choice([1.2, 2, 3])),
        )
        noise, seed = float(self.random.choice([0.008, 0.015, 0.025])), int(self.random.integers(1e9))
        return model, {"rows": rows, "width": width, "noise": noise, "seed": seed} | changes

    def sample(self, **changes: Any) -> Batch:
        model, options = self.draw(**changes)
        return sampled(model, **options)

    def some(self, batch: Batch, share: float) -> set[int]:
        """So many of the rows, three at least."""
        rows = len(batch.lengths)
        return set(self.random.choice(rows, min(rows, max(3, int(share * rows))), replace=False).tolist())


def shifted(by: int) -> Any:
    def move(_: int, x: Any) -> Any:
        moved = np.zeros_like(x)
        moved[max(0, by) : x.size + min(0, by)] = x[max(0, -by) : x.size - max(0, by)]
        return moved

    return move


def swapped(pieces: int) -> Any:
    def move(_: int, x: Any) -> Any:
        size = x.size // pieces
        parts = [x[i * size : (i + 1) * size if i < pieces - 1 else x.size] for i in range(pieces)]
        if pieces == 2:
            return np.concatenate(parts[::-1])
        return np.concatenate([parts[0], parts[2], parts[1], *parts[3:]])

    return move


def permuted(s: Set, batch: Batch, share: float) -> Batch:
    padded, order = np.where(batch.mask, batch.rollout, 0.0), np.arange(len(batch.lengths))
    chosen = np.array(sorted(s.some(batch, share)))
    order[chosen] = np.roll(chosen, 1)
    return replace(batch, rollout=padded[order])


def healthy(s: Set) -> None:
    for name, options in {
        "plain": {}, "more noise": {"noise": 0.04}, "two rows": {"rows": 2}, "few tokens": {"rows": 12, "width": 30},
        "short rows": {"rows": 64, "width": 8, "shortest": 1}, "one row": {"rows": 1},
        "cold on both sides": {"sampler": Sampler(temperature=0.4), "trainer": Sampler(temperature=0.4)},
        "warm on both sides": {"sampler": Sampler(temperature=1.3), "trainer": Sampler(temperature=1.3)},
        "raw log-probs under top-p": {"sampler": Sampler(top_p=0.99), "stored": PLAIN},
    }.items():  # fmt: skip
        s.add(s.sample(**options), [], name)
    batch = s.sample()
    hit = s.random.random(batch.old.shape) < 0.0015
    s.add(
        replace(batch, old=np.where(hit, batch.old - np.abs(s.random.normal(0, 0.8, hit.shape)), batch.old)), [], "moe"
    )
    zeros = s.sample()
    cut = {name: np.where(getattr(zeros, name) > -0.02, 0.0, getattr(zeros, name)) for name in ("rollout", "old")}
    s.add(replace(zeros, **cut), [], "true zeros")
    batch = s.sample()
    order = np.tile(np.arange(len(batch.lengths)), 2)
    s.add(Batch(batch.rollout[order], batch.old[order], batch.ids[order], batch.lengths[order]), [], "rows twice")
    model, options = s.draw()
    s.add(sampled(Model.random(options["seed"], 256, 6.0), **options), [], "repetitive")
    batch = s.sample()
    rounded = {name: torch.tensor(getattr(batch, name)).bfloat16().double().numpy() for name in ("rollout", "old")}
    s.add(replace(batch, **rounded), [], "bf16 on both sides")


def values(s: Set) -> None:
    batch = s.sample()
    s.add(replace(batch, rollout=np.exp(batch.rollout)), "not-log-probs", "probabilities")
    s.add(replace(batch, old=np.exp(batch.old)), "not-log-probs", "probabilities, train")
    s.add(replace(batch, rollout=-batch.rollout), "not-log-probs", "negated")
    s.add(replace(batch, rollout=batch.rollout / np.log(2)), "not-log-probs", "base 2")
    s.add(replace(batch, old=batch.old / np.log(10)), "not-log-probs", "base 10, train")
    s.add(replace(batch, old=batch.rollout), "identical", "copy")
    broken = batch.rollout.copy()
    broken[0, 0] = np.nan
    s.add(replace(batch, rollout=broken), "non-finite", "one NaN")
    above = batch.rollout.copy()
    above[:3, 1] = (0.2, 0.03, 0.5)
    s.add(replace(batch, rollout=above), "positive-log-prob", "three")
    for value in (0.0, 1.0, -1.0, -9999.0):
        batch = s.sample()
        last = batch.rollout.copy()
        last[np.arange(len(last)), batch.lengths - 1] = value
        s.add(replace(batch, rollout=last), "filler", f"{value} at ends", also="positive-log-prob")
        span = batch.rollout.copy()
        for row in range(0, len(span), 2):
            first = int(s.random.integers(0, max(1, batch.lengths[row] - 8)))
            span[row, first : first + 8] = value
        s.add(replace(batch, rollout=span), "filler", f"{value} in spans", also="positive-log-prob")
        hit = s.random.random(batch.rollout.shape) < s.random.choice([0.003, 0.01, 0.05])
        scattered = np.where(hit, value, batch.rollout)
        s.add(replace(batch, rollout=scattered), "filler", f"{value} scattered", also="positive-log-prob")


def pairing(s: Set) -> None:
    for lag in (1, -1, 2, -3):
        s.add(s.sample().by_row(shifted(lag)), "shifted", f"by {lag}", also="filler")
        s.add(s.sample().by_row(lambda _, x, lag=lag: np.roll(x, lag)), "shifted", f"turned by {lag}")
    s.add(s.sample(width=300, shortest=150).by_row(shifted(20)), "shifted", "by 20", also="filler")
    for share in (0.1, 0.3, 0.6):
        batch = s.sample()
        rows = s.some(batch, share)
        moved = batch.by_row(lambda row, x, rows=rows: np.roll(x, 1) if row in rows else x)
        s.add(moved, "row-offset", f"{share:.0%} by 1", "weak" if share < 0.2 else "medium")
    s.add(s.sample().by_row(lambda row, x: np.roll(x, 1 + row % 6)), "row-offset", "each its own", "strong")
    for share in (0.08, 0.3, 1.0):
        s.add(permuted(s, s.sample(), share), "rows-permuted", f"{share:.0%}", also="filler")
    for share, pieces in ((0.35, 2), (1.0, 2), (0.35, 4), (1.0, 4)):
        batch = s.sample(width=160, shortest=70)
        rows, move = s.some(batch, share), swapped(pieces)
        moved = batch.by_row(lambda row, x, rows=rows, move=move: move(row, x) if row in rows else x)
        s.add(moved, "blocks-permuted", f"{share:.0%}, {pieces} pieces")


def samplers(s: Set) -> None:
    for t in (0.6, 0.8, 0.9, 1.2, 1.5):
        heat, strength = Sampler(temperature=t), "weak" if t in (0.9, 1.2) else "strong"
        s.add(s.sample(sampler=heat, stored=PLAIN, trainer=heat), "temperature", f"{t} in the trainer", strength)
        s.add(s.sample(sampler=heat), "temperature", f"{t} in the rollout", strength)
    for cut in ({"top_p": 0.8}, {"top_p": 0.9}, {"top_p": 0.95}, {"top_p": 0.98}, {"top_k": 5}, {"top_k": 20},
                {"min_p": 0.05}):  # fmt: skip
        s.add(
            s.sample(sampler=Sampler(**cut)),
            "truncated-sampling",
            str(cut),
            "weak" if 0.98 in cut.values() else "medium",
        )
    for more in ({"repetition": 1.05}, {"repetition": 1.1}, {"repetition": 1.3}, {"presence": 0.2}, {"presence": 0.5}):
        s.add(s.sample(sampler=Sampler(**more)), "penalty", str(more))


def places(s: Set) -> None:
    for size, strength in ((0.08, "weak"), (0.15, "medium"), (0.4, "strong")):
        model, options = s.draw()
        batch = sampled(model, **options, train_model=model.perturbed(size, 1))
        if np.abs(batch.old - batch.rollout)[batch.mask].mean() > 0.056:
            s.add(batch, "different-weights", f"{size}", strength)
    for size in (0.15, 0.4):
        model, options = s.draw()
        options |= {"width": max(120, options["width"]), "shortest": 60}
        s.add(sampled(model, **options, before=model.perturbed(size, 1), switch=40), "version-switch", f"{size} at 40")
        at = s.random.integers(10, options["width"], options["rows"])
        at[s.random.random(options["rows"]) < 0.4] = 0
        also = "row-concentrated different-weights"
        s.add(
            sampled(model, **options, before=model.perturbed(size, 1), switch=at),
            "version-switch",
            f"{size}",
            also=also,
        )
    for growth in (0.05, 0.2):
        s.add(s.sample(rows=24, width=400, growth=growth), "position-growth", f"{growth} a token")
    s.add(s.sample(other_prompt=True, shortest=30), "turn-start", "another prompt")
    for share in (0.06, 0.2):
        for size in (0.4, 1.0):
            model, options = s.draw()
            options |= {"rows": max(40, options["rows"]), "shortest": 20}
            batch, other = sampled(model, **options), sampled(model, **options, train_model=model.perturbed(size, 1))
            rows = sorted(s.some(batch, share))
            old = batch.old.copy()
            old[rows] = other.old[rows]
            s.add(replace(batch, old=old), "row-concentrated", f"{share:.0%} of rows, {size}")
    for share in (0.006, 0.015, 0.03):
        batch = s.sample()
        hit = s.random.random(batch.old.shape) < share
        far = np.where(hit, batch.old - s.random.uniform(2, 8, hit.shape), batch.old)
        s.add(replace(batch, old=far), "sparse-outliers", f"{share:.1%}", also="length-amplified")
    batch = s.sample(rows=16, width=2000, noise=0.015, shortest=1500)
    s.add(replace(batch, old=batch.old - 0.002), "length-amplified", "bias of 0.002")


def two_at_once(s: Set) -> None:
    cold = Sampler(temperature=0.7)
    s.add(s.sample(sampler=cold).by_row(shifted(1)), ["shifted", "temperature"], "", also="filler")
    s.add(permuted(s, s.sample(sampler=cold), 1.0), ["rows-permuted", "temperature"], "", also="filler")
    for options, label in (({"sampler": cold}, "temperature"), ({}, "different-weights")):
        model, drawn = s.draw(**options)
        batch = sampled(model, **drawn, train_model=None if options else model.perturbed(0.4, 1))
        last = batch.rollout.copy()
        last[np.arange(len(last)), batch.lengths - 1] = 0.0
        s.add(replace(batch, rollout=last), ["filler", label], "", also="length-amplified")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--healthy", type=int, default=5, help="rounds of healthy dumps for each of faulty ones")
    arguments = parser.parse_args()
    labelled = Set(arguments.folder, arguments.seed)
    for number in range(arguments.rounds):
        for _ in range(arguments.healthy):
            healthy(labelled)
        for kind in (values, pairing, samplers, places, two_at_once):
            kind(labelled)
        (arguments.folder / "manifest.json").write_text(json.dumps(labelled.entries, indent=1))
        print(f"round {number + 1}: {len(labelled.entries)} dumps", flush=True)


if __name__ == "__main__":
    main()
