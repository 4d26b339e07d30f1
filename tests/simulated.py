"""A small recurrent language model in numpy, sampled by one engine and scored by another: dumps with known faults.

Both sides add logit noise of their own, as two implementations of one network do; every fault is made where it happens
in a real stack: in the weights, in the sampler, or in how values are put into the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


@dataclass(frozen=True)
class Model:
    """h' = tanh(W h + E[token]), logits = U h + b."""

    embedding: Floats
    recurrent: Floats
    output: Floats
    bias: Floats

    @classmethod
    def random(cls, seed: int, vocabulary: int = 512, scale: float = 2.0, hidden: int = 64) -> Model:
        """`scale` is how sure the model is of its next token."""
        generator = np.random.default_rng(seed)
        return cls(
            generator.normal(0, 1, (vocabulary, hidden)),
            generator.normal(0, 0.9 / np.sqrt(hidden), (hidden, hidden)),
            generator.normal(0, scale * np.sqrt(8 / hidden), (hidden, vocabulary)),
            -0.7 * np.log(np.arange(1, vocabulary + 1)),
        )

    def perturbed(self, size: float, seed: int) -> Model:
        """Other weights: as of some optimiser steps earlier, or rounded."""
        generator = np.random.default_rng(seed)
        return replace(
            self,
            output=self.output + generator.normal(0, size * self.output.std(), self.output.shape),
            recurrent=self.recurrent + generator.normal(0, size * self.recurrent.std(), self.recurrent.shape),
        )

    def step(self, state: Floats, token: Ints) -> Floats:
        result: Floats = np.tanh(state @ self.recurrent + 0.7 * self.embedding[token])
        return result

    def logits(self, state: Floats) -> Floats:
        return state @ self.output + self.bias


@dataclass(frozen=True)
class Sampler:
    """What a side does to the logits before it takes log-probs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0

    def log_probs(self, logits: Floats, seen: npt.NDArray[np.bool_]) -> Floats:
        x = logits
        if self.repetition != 1:
            x = np.where(seen, np.where(x > 0, x / self.repetition, x * self.repetition), x)
        x = (x - self.presence * seen) / self.temperature
        if self.top_k:
            x = np.where(x < np.sort(x, -1)[:, -self.top_k][:, None], -np.inf, x)
        if self.top_p < 1:
            log_probs = log_softmax(x)
            order = np.argsort(-log_probs, -1)
            probs = np.exp(np.take_along_axis(log_probs, order, -1))
            drop = np.zeros(x.shape, dtype=bool)
            np.put_along_axis(drop, order, np.cumsum(probs, -1) - probs >= self.top_p, -1)
            x = np.where(drop, -np.inf, x)
        if self.min_p:
            log_probs = log_softmax(x)
            x = np.where(log_probs < log_probs.max(-1, keepdims=True) + np.log(self.min_p), -np.inf, x)
        return log_softmax(x)


PLAIN = Sampler()


@dataclass
class Batch:
    """Rows [B, T] of one length each; what a dump of them holds is `tensors`."""

    rollout: Floats
    old: Floats
    ids: Ints
    lengths: Ints
    extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        return np.arange(self.rollout.shape[1]) < self.lengths[:, None]

    @property
    def tensors(self) -> dict[str, Tensor]:
        values = {
            name: torch.tensor(np.where(self.mask, x, 0.0), dtype=torch.float32)
            for name, x in (("rollout_log_probs", self.rollout), ("old_log_probs", self.old))
        }
        mask = torch.tensor(self.mask).to(torch.uint8)
        return {**values, "response_mask": mask, "responses": torch.tensor(self.ids, dtype=torch.int32), **self.extra}

    def by_row(self, move: Any) -> Batch:
        """Rollout values of each row, moved: move(row number, values) gives as many."""
        moved = self.rollout.copy()
        for row, length in enumerate(self.lengths):
            moved[row, :length] = move(row, self.rollout[row, :length])
        return replace(self, rollout=moved)


def sampled(
    model: Model,
    rows: int = 48,
    width: int = 120,
    seed: int = 0,
    *,
    noise: float = 0.01,
    sampler: Sampler = PLAIN,
    stored: Sampler | None = None,
    trainer: Sampler = PLAIN,
    train_model: Model | None = None,
    before: Model | None = None,
    switch: int | Ints = 0,
    growth: float = 0.0,
    other_prompt: bool = False,
    shortest: int = 4,
) -> Batch:
    """Sample rows and score them again.

    `stored` is what the rollout's log-probs are of, if not what was sampled from. With `before`, the rollout engine has
    those weights up to token `switch`. `growth` lets the trainer's noise grow along the row.
    """
    generator = np.random.default_rng(seed)
    train_model, before = train_model or model, before or model
    vocabulary, hidden = model.embedding.shape
    prompt = generator.integers(0, vocabulary, (rows, 4))
    train_prompt = generator.integers(0, vocabulary, prompt.shape) if other_prompt else prompt
    states = {side: np.zeros((rows, hidden)) for side in ("now", "before", "train")}
    seen = np.zeros((rows, vocabulary), dtype=bool)
    all_rows = np.arange(rows)

    def advance(token: Ints, train_token: Ints) -> None:
        states["now"] = model.step(states["now"], token)
        states["before"] = before.step(states["before"], token)
        states["train"] = train_model.step(states["train"], train_token)
        seen[all_rows, token] = True

    for i in range(prompt.shape[1]):
        advance(prompt[:, i], train_prompt[:, i])
    rollout, old = np.zeros((rows, width)), np.zeros((rows, width))
    ids = np.zeros((rows, width), dtype=np.int64)
    for t in range(width):
        is_before = np.broadcast_to(t < np.asarray(switch), (rows,))[:, None]
        logits = np.where(is_before, before.logits(states["before"]), model.logits(states["now"]))
        logits = logits + generator.normal(0, noise, logits.shape)
        drawn_from = sampler.log_probs(logits, seen)
        token = np.argmax(drawn_from + generator.gumbel(size=drawn_from.shape), -1)
        kept = drawn_from if stored is None else stored.log_probs(logits, seen)
        rollout[:, t] = kept[all_rows, token]
        logits = train_model.logits(states["train"])
        logits = logits + generator.normal(0, noise * (1 + growth * t), logits.shape)
        old[:, t] = trainer.log_probs(logits, seen)[all_rows, token]
        ids[:, t] = token
        advance(token, token)
    lengths = np.clip((width * generator.uniform(0.2, 1, rows)).astype(np.int64), min(shortest, width), width)
    return Batch(rollout, old, ids, lengths)
