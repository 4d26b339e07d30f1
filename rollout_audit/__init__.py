"""rollout-audit: what the difference between rollout and train log-probs says about an RL run.

    import rollout_audit
    weights, mask, metrics = rollout_audit.compute_rollout_correction_and_rejection_mask(
        old_log_prob, rollout_log_prob, response_mask, rollout_is="token")

The functions live in `rollout_audit.api`; torch is imported when one of them is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = [
    "calculate_debug_metrics",
    "calculate_log_prob_diff",
    "calculate_token_list_diff",
    "compute_is_metrics",
    "compute_offpolicy_metrics",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "pearson_correlation_coefficient",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("rollout_audit.api"), name)
    raise AttributeError(f"module 'rollout_audit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
