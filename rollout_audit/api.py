"""The public functions: tensors in, plain dicts and tensors out, with verl 0.9.1's names, arguments and results.

    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob, rollout_log_prob, response_mask, rollout_is="token", rollout_is_threshold=2.0)

They build a Batch of the padded tensors and read the same metric families as the command line. Statistics are
float64 whatever the input; returned tensors have the input's dtype. Numbers verl would log as nan or inf are that.
Log-probs are [B, T], natural log; masks are 0/1 of any dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollout_audit.batch import Batch
from rollout_audit.config import Settings, parse_rules
from rollout_audit.kernels.importance import apply_threshold, clamp_log_ratio
from rollout_audit.metrics.debug import PREFIX, DebugCompare
from rollout_audit.metrics.importance import Importance
from rollout_audit.metrics.offpolicy import OffPolicy
from rollout_audit.metrics.rejection import Rejection, RuleStatistics
from rollout_audit.packing import count_not_binary
from rollout_audit.stats import TopK

logger = logging.getLogger(__name__)


def _check_mask(response_mask: Tensor) -> None:
    if not bool(response_mask.any()):
        raise ValueError("response_mask must contain at least one valid token (1).")
    if count_not_binary(response_mask):
        raise ValueError("response_mask must hold 0 and 1 only: other values would weight tokens.")


def _batch(response_mask: Tensor, **fields: Tensor | None) -> Batch:
    padded = {name: x.detach() for name, x in fields.items() if x is not None}
    return Batch.from_padded(padded, response_mask.detach(), device=str(response_mask.device))


def _log_ratio_batch(log_ratio: Tensor, response_mask: Tensor) -> Batch:
    """A batch of which only the log ratio is known: train = log ratio, rollout = 0."""
    return _batch(response_mask, old_log_probs=log_ratio, rollout_log_probs=torch.zeros_like(log_ratio))


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Applied importance weights [B, T], 0 in padding (NaN where padding is NaN, as in verl), and their metrics.

    Raises ValueError for an unknown level, a threshold that is not positive or an empty mask, TypeError for a
    threshold of another type. verl 0.9.1, rollout_corr_helper.compute_rollout_correction_weights.
    """
    settings = Settings(rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
    _check_mask(response_mask)
    batch = _log_ratio_batch(log_ratio, response_mask)
    family = Importance(settings)
    family.update(batch)
    metrics = family.verl(batch.num_rows, response_mask.dtype)

    exact = log_ratio.detach().double()
    if rollout_is == "sequence":
        valid = response_mask.bool()
        exact = torch.where(valid, exact, 0.0).sum(-1, keepdim=True).expand_as(exact)
    raw = clamp_log_ratio(exact).exp() * response_mask
    weights = apply_threshold(raw, settings.lower, settings.upper)
    if rollout_is_batch_normalize and metrics["rollout_is_batch_norm_factor"] != 1.0:
        weights = weights / metrics["rollout_is_batch_norm_factor"]
    return weights.to(torch.promote_types(log_ratio.dtype, response_mask.dtype)), metrics


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mask without rejected tokens, in its own dtype, and the rejection metrics.

    Raises ValueError for an unknown option, thresholds that do not fit, or an empty mask.
    verl 0.9.1, rollout_corr_helper.compute_rollout_rejection_mask.
    """
    rules = parse_rules(rollout_rs, rollout_rs_threshold)
    if log_ratio.shape[0] == 0:
        return response_mask, {}
    _check_mask(response_mask)
    batch = _log_ratio_batch(log_ratio, response_mask)
    family = Rejection([RuleStatistics(rule) for rule in rules])
    kept_N = family.update(batch)
    metrics = family.verl(batch.num_rows, batch.num_tokens, response_mask.dtype)
    if kept_N is None:
        return response_mask.clone(), metrics
    mask = torch.zeros_like(response_mask)
    mask[response_mask != 0] = kept_N.to(mask.dtype).to(mask.device)
    return mask, metrics


def compute_is_metrics(
    rollout_is_weights: Tensor,
    raw_rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:
    """Metrics of weights that were computed elsewhere; raw ones give the high and low fractions (PR #6806).

    verl 0.9.1, rollout_corr_helper.compute_is_metrics.
    """
    _check_mask(response_mask)
    threshold = rollout_is_threshold
    spec = threshold if rollout_is_threshold_lower is None else f"{rollout_is_threshold_lower}_{threshold}"
    family = Importance(Settings(rollout_is if rollout_is == "sequence" else "token", spec))
    two_dims = rollout_is_weights.dim() > 1
    weights, raw, mask = (
        x if two_dims else x[None] for x in (rollout_is_weights, raw_rollout_is_weights, response_mask)
    )
    batch = _batch(mask, rollout_is_weights=weights, raw_rollout_is_weights=raw)
    family.update(batch)
    if rollout_is == "sequence":
        log_sum_R = log_ratio_for_metrics.detach().double().reshape(batch.num_rows, -1)[batch.filled, 0]
        family.replace_log_sums(log_sum_R)
    metrics = family.verl(batch.num_rows, mask.dtype)
    metrics.pop("rollout_is_oob_ratio", None)
    return {key: value for key, value in metrics.items() if two_dims or "_seq_" not in key}


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, Any]:
    """Perplexities, KL and chi-squared; without rollout log-probs the train side only.

    An empty mask is an AssertionError, as in verl 0.9.1, rollout_corr_helper.compute_offpolicy_metrics.
    """
    assert response_mask.any(), "Expected at least one valid token in response_mask"
    _check_mask(response_mask)
    batch = _batch(response_mask, old_log_probs=old_log_prob, rollout_log_probs=rollout_log_prob)
    family = OffPolicy()
    family.update(batch)
    return family.verl(batch.num_rows, batch.num_tokens, response_mask.dtype)


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Weights (or None), mask after rejection, and all metrics under `rollout_corr/`.

    verl returns the weights wrapped in a DataProto; here they are a tensor. Raises ValueError for shapes that differ,
    an empty mask and bad settings. verl 0.9.1, rollout_corr_helper.compute_rollout_correction_and_rejection_mask.
    """
    if not bool(response_mask.any()):
        raise ValueError("response_mask must contain at least one valid token (1).")
    if old_log_prob.shape != rollout_log_prob.shape:
        raise ValueError(
            f"old_log_prob shape {old_log_prob.shape} does not match rollout_log_prob shape {rollout_log_prob.shape}."
        )
    if old_log_prob.shape != response_mask.shape:
        raise ValueError(
            f"log_prob shape {old_log_prob.shape} does not match response_mask shape {response_mask.shape}."
        )
    log_ratio = old_log_prob - rollout_log_prob
    metrics: dict[str, float] = {}
    weights = None
    if rollout_is is not None and rollout_is_threshold is not None:
        weights, weight_metrics = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        metrics |= weight_metrics
    mask = response_mask.clone()
    if rollout_rs is not None:
        mask, rejection_metrics = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold
        )
        metrics |= rejection_metrics
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    return weights, mask, {f"rollout_corr/{key}": value for key, value in metrics.items()}


def calculate_debug_metrics(data: Mapping[str, Tensor] | Any) -> dict[str, float]:
    """Differences of probability between rollout and train, under `training/`.

    `data` is a mapping of tensors (or an object whose `.batch` is one, such as verl's DataProto) with
    rollout_log_probs, old_log_probs and responses; mask: response_mask, else attention_mask, the last columns as
    wide as responses; else every token, with a warning. verl 0.9.1, verl/utils/debug/metrics.py.
    """
    fields = getattr(data, "batch", data)
    rollout, old = fields["rollout_log_probs"], fields["old_log_probs"]
    name = next((name for name in ("response_mask", "attention_mask") if name in fields.keys()), None)  # noqa: SIM118
    if name is None:
        logger.warning("no response_mask or attention_mask: all log probs are used")
    mask = torch.ones_like(rollout) if name is None else fields[name]
    width = fields["responses"].shape[1]
    mask = mask[:, -width:].bool()
    if not bool(mask.any()):
        logger.warning("the mask has no valid token")
    family = DebugCompare(TopK(0))
    family.update(_batch(mask, rollout_log_probs=rollout, old_log_probs=old))
    return {PREFIX + key: value for key, value in family.verl().items()}


def calculate_token_list_diff(tensor1: Tensor, tensor2: Tensor, mask: Tensor) -> Tensor:
    """Number of token ids that differ in each row [B], where the mask is 1.

    Of tensors of another shape, verl 0.9.1 says "all differ" (ones of tensor1's shape) and warns.
    """
    if tensor1.numel() == 0 or tensor2.numel() == 0:
        return torch.zeros(tensor1.shape[0], dtype=torch.long, device=tensor1.device)
    if not tensor1.shape == tensor2.shape == mask.shape:
        logger.warning("shapes differ: %s, %s, mask %s", tensor1.shape, tensor2.shape, mask.shape)
        return torch.ones_like(tensor1)
    differs = tensor1 != tensor2.to(tensor1.device)
    return (differs & (mask.to(tensor1.device) == 1)).sum(dim=1)


def pearson_correlation_coefficient(tensor1: Tensor, tensor2: Tensor, mask: Tensor) -> float:
    """Pearson correlation of two tensors where a bool mask is set; 0 for shapes that differ, NaN for a constant."""
    if not tensor1.shape == tensor2.shape == mask.shape:
        return 0
    pair = torch.stack([torch.masked_select(x, mask).double() for x in (tensor1, tensor2)])
    return float(torch.corrcoef(pair)[0, 1])


def calculate_log_prob_diff(log_probs1: Tensor, log_probs2: Tensor, mask: Tensor) -> Tensor:
    """|difference| of the tokens where a bool mask is set, as a vector."""
    return torch.masked_select(torch.abs(log_probs1 - log_probs2), mask)
