"""What the sampler did to the distribution whose log-probs one side stores: temperature, truncation, penalties.

Where tokens were drawn from the law whose log-probs are stored as the rollout's, E[exp d] is 1, or the kept mass where
the law was cut to its top (reference: the normalisation identity). The three leave different marks on d.
"""

from __future__ import annotations

import numpy as np

from rollout_audit.diagnosis.found import Found, Unsure
from rollout_audit.diagnosis.view import Bools, View, deciles
from rollout_audit.report import Finding

_LEAST_TOKENS = 200
_SE = 5.0


def penalty(view: View) -> Found | Unsure | None:
    """Tokens that occurred before in the response are treated otherwise, at equal probability."""
    if view.size < _LEAST_TOKENS or (view.ids < 0).any():
        return None
    before = _seen_before(view)
    if min(before.sum(), (~before).sum()) < 60:
        return None
    gaps, weights, variances, sides = [], [], [], []
    # At equal place in the row too: later tokens repeat more, and may differ more or less for reasons of their own.
    classes = deciles(view.rollout, 4) * 4 + deciles(view.index.astype(float), 4)
    for number in range(16):
        inside = classes == number
        again, fresh = inside & before, inside & ~before
        if min(again.sum(), fresh.sum()) < 6:
            continue
        (a, se_a), (b, se_b) = view.mean(np.clip(view.d, -3, 3), again), view.mean(np.clip(view.d, -3, 3), fresh)
        gaps.append(a - b)
        sides.append((a, b))
        variances.append(se_a**2 + se_b**2)
        weights.append(min(again.sum(), fresh.sum()))
    if len(gaps) < 2:
        return None
    share = np.array(weights) / sum(weights)
    gap, se = float(share @ gaps), float(np.sqrt((share**2) @ variances))
    # A penalty moves repeated tokens one way and all others the other; other weights move both the same way.
    again_mean, fresh_mean = (float(share @ np.array([pair[i] for pair in sides])) for i in (0, 1))
    noise = max(view.typical, 1e-4)
    if not (abs(gap) > max(0.03, 1.8 * noise) and abs(gap) > 2 * _SE * se and gap * np.median(gaps) > 0):
        return None
    if not again_mean * fresh_mean < 0:
        return None
    ratio, _ = view.mean_ratio()
    side = "rollout" if gap > 0 else "train"
    return Found(
        Finding(
            "penalty",
            "error",
            f"tokens that occurred before in their response have a log ratio {gap:+.3g} nats off that of new ones at "
            f"equal probability ({abs(gap) / se:.0f} standard errors): a repetition or presence penalty is in the "
            f"{side} log-probs only (mean ratio {ratio:.4g})",
            {
                "gap": gap,
                "standard_error": se,
                "repeated_tokens": int(before.sum()),
                "mean_ratio": ratio,
                "exp_mean_log_ratio": float(np.exp(view.d.mean())),
            },
            remedy="sample without repetition, presence and frequency penalties, which the trainer does not know: "
            'repetition_penalty=1.0; in vLLM generation_config="vllm", or the model\'s own file sets them',
        ),
        explains=None,
        silences=frozenset({"temperature", "truncated-sampling", *_GENERAL}),
    )


_GENERAL = ("different-weights", "position-growth", "version-switch", "turn-start", "length-amplified",
            "row-concentrated", "sparse-outliers")  # fmt: skip
"""What cannot be told apart from a sampler's mark, which cannot be undone."""


def _seen_before(view: View) -> Bools:
    """Whether each token's id occurred before in its row."""
    order = np.lexsort((np.arange(view.size), view.ids, view.row))
    same = np.r_[False, (view.ids[order][1:] == view.ids[order][:-1]) & (view.row[order][1:] == view.row[order][:-1])]
    result = np.empty(view.size, dtype=bool)
    result[order] = same
    return result


def temperature(view: View) -> Found | None:
    """Confident tokens moved one way and unlikely ones the other: one side is sharper than the other."""
    if view.size < _LEAST_TOKENS:
        return None
    level = (view.rollout + view.old) / 2
    live = level < -1e-3  # tokens without a rival move under no temperature
    if live.sum() < _LEAST_TOKENS:
        return None
    edges = np.quantile(level[live], (0.12, 0.5))
    top, bottom = live & (level > edges[1]), live & (level <= edges[0])
    if min(top.sum(), bottom.sum()) < 20:
        return None  # too few different values to be more and less likely
    d = np.clip(view.d, -5, 5)
    (high, se_high), (low, se_low) = view.mean(d, top), view.mean(d, bottom)
    noise = max(float(np.median(np.abs(d[top]))), 1e-5)
    up = float((d[top] > 0).mean())
    one_sided = max(up, 1 - up)
    opposite = high * low < 0 and abs(high) > _SE * se_high and abs(low) > 3 * se_low
    if not (opposite and one_sided > 0.72 and abs(high) > 0.5 * noise and abs(high - low) > max(0.03, 1.5 * noise)):
        return None
    ratio, se_ratio = view.mean_ratio()
    sharper = "train" if high > 0 else "rollout"
    # The mean ratio is 1 where the rollout's own law was stored, whatever the trainer does.
    stored = abs(ratio - 1) < max(4 * se_ratio, 0.01)
    story = (
        f"the {sharper} side is sharper: " + (
            "the rollout's temperature is in its log-probs and not in the trainer's"
            if stored else "the trainer's temperature is not in the rollout's log-probs (raw log-probs were stored)"
        )
    )  # fmt: skip
    return Found(
        Finding(
            "temperature",
            "error",
            f"{story}; log ratio {high:+.3g} on the likelier half of tokens, {low:+.3g} on the unlikeliest 12 % "
            f"(standard errors {se_high:.1g}, {se_low:.1g}), mean ratio {ratio:.4g}",
            {
                "log_ratio_likely": high,
                "log_ratio_unlikely": low,
                "standard_error_likely": se_high,
                "standard_error_unlikely": se_low,
                "share_positive_likely": up,
                "mean_ratio": ratio,
                "sharper": sharper,
            },
            remedy="use one temperature on both sides and store processed log-probs",
        ),
        silences=frozenset({"truncated-sampling", *_GENERAL}),
    )


def truncated_sampling(view: View) -> Found | None:
    """Log ratios of one sign, and a mean ratio below 1: the mass that top-p, top-k or min-p kept."""
    if view.size < _LEAST_TOKENS:
        return None
    d = view.d
    ratio, se = view.mean_ratio()
    mean, se_mean = view.mean(np.clip(d, -3, 3))
    noise = _noise_above(view)
    below, above = float((d < -2.5 * noise).mean()), float((d > 2.5 * noise).mean())
    level = view.rollout
    bottom = level <= np.quantile(level, 0.25)
    low, se_low = view.mean(np.clip(d, -3, 3), bottom)
    if not (
        ratio + 4 * se < 0.997
        and mean + _SE * se_mean < -0.002
        and below > max(0.03, 6 * above)
        and low + 3 * se_low < 0
    ):
        return None
    share = float((d > 0).mean())
    return Found(
        Finding(
            "truncated-sampling",
            "error",
            f"log ratios lie below 0 ({1 - share:.0%} of tokens, mean {mean:.3g}) and the mean ratio is {ratio:.4g}: "
            "the rollout's log-probs were renormalised over a top-p, top-k or min-p that kept that share of the mass",
            {"mean_ratio": ratio, "standard_error": se, "share_positive": share, "mean_log_ratio": mean},
            remedy="sample from the whole vocabulary (top_p=1, top_k=-1 or 0, min_p=0), or give the trainer the "
            "sampler's mask",
        ),
        silences=frozenset(_GENERAL),
    )


def _noise_above(view: View) -> float:
    """The scale of d above 0, where truncation moves nothing to: twice the median of the positive ones."""
    positive = view.d[view.d > 0]
    if positive.size < 20:
        return 1e-6
    return max(float(np.median(positive)) * 1.5, 1e-6)
