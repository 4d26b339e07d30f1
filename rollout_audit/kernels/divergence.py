"""Estimators of the divergence between rollout and train policy, token by token, from the log ratio.

John Schulman, "Approximating KL Divergence" (2020), with r = train/rollout and samples from the rollout policy:
the mean of each estimates KL(rollout || train).
"""

from __future__ import annotations

from torch import Tensor


def k1(log_ratio: Tensor) -> Tensor:
    """-log r: unbiased, of either sign."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log r)² / 2: never negative, biased."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r: never negative, unbiased."""
    return log_ratio.expm1() - log_ratio  # exp(x) - 1 cancels for r near 1, which is most tokens


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
