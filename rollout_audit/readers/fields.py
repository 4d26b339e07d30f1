"""Which tensor of a file is which canonical field: the names of each framework, and what the user says.

A framework's names are spelled here and nowhere else. To read another one's names, add them to a row of ALIASES.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollout_audit.errors import AuditError

LOG_PROBS = ("old_log_probs", "rollout_log_probs")
WEIGHTS = ("rollout_is_weights", "raw_rollout_is_weights")

ALIASES: dict[str, tuple[str, ...]] = {
    # canonical first (verl's); then TRL, ms-swift, OpenRLHF, NeMo RL, ROLL, SkyRL, prime-rl
    "rollout_log_probs": (
        "rollout_log_probs",
        "sampling_per_token_logps",
        "rollout_per_token_logps",
        "generation_logprobs",
        "infer_logprobs",
        "rollout_logprobs",
        "inference_logprobs",
    ),
    "old_log_probs": (
        "old_log_probs",
        "old_per_token_logps",
        "action_log_probs",
        "prev_logprobs",
        "train_log_probs",
        "trainer_logprobs",
    ),
    "response_mask": ("response_mask", "completion_mask", "action_mask", "loss_mask", "token_loss_mask", "token_mask"),
    "attention_mask": ("attention_mask",),
    "responses": ("responses", "completion_ids", "response_ids"),
    "rollout_is_weights": ("rollout_is_weights", "importance_sampling_ratio", "train_infer_is_weight"),
    "raw_rollout_is_weights": ("raw_rollout_is_weights",),
    "uid": ("uid",),
}


def parse_overrides(words: Iterable[str]) -> dict[str, str]:
    """`--field CANONICAL=NAME`, repeated, as a mapping."""
    result: dict[str, str] = {}
    for word in words:
        canonical, separator, name = word.partition("=")
        if not separator or not name or canonical not in ALIASES:
            raise AuditError(
                f"--field {word}: not understood",
                wanted="CANONICAL=NAME, with CANONICAL one of " + ", ".join(ALIASES),
            )
        if result.setdefault(canonical, name) != name:
            raise AuditError(f"{canonical} is given twice", wanted="one tensor", found=f"{result[canonical]}, {name}")
    return result


def resolve(canonical: str, names: Iterable[str], overrides: dict[str, str], path: str) -> tuple[str, str] | None:
    """(name in the file, why it was taken) of a canonical field, or None. Asks where two names could be meant."""
    names = list(names)
    if canonical in overrides:
        name = overrides[canonical]
        if name not in names:
            raise AuditError(
                f"no tensor '{name}'", path=path, wanted=f"{name} (--field {canonical}={name})", found=listing(names)
            )
        return name, "--field"
    taken = set(overrides.values())
    found = [name for name in ALIASES[canonical] if name in names and name not in taken]
    if len(found) > 1:
        raise AuditError(
            f"several tensors could be {canonical}",
            path=path,
            wanted="one of them",
            found=", ".join(found),
            do=f"say which: --field {canonical}={found[0]}",
        )
    if not found:
        return None
    return found[0], "its name" if found[0] == canonical else f"another name of {canonical}"


def missing(canonical: str, names: Iterable[str], path: str, do: str = "") -> AuditError:
    """The error for a field that a command needs."""
    return AuditError(
        f"no {canonical}",
        path=path,
        wanted=" or ".join(ALIASES[canonical]),
        found=listing(names),
        do=do or f"if one of these is it, say so: --field {canonical}=NAME",
    )


def listing(names: Iterable[str]) -> str:
    """Names in a message."""
    return ", ".join(sorted(names)) or "no tensors"
