"""What is in a file, and what can be computed from it. numpy only: no torch, so that the answer comes at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_audit.errors import AuditError
from rollout_audit.readers.fields import ALIASES, LOG_PROBS, WEIGHTS, resolve
from rollout_audit.readers.safetensors_file import FLOATS, SafetensorsFile, TensorInfo, row_blocks
from rollout_audit.report import TOKENS, Audited, Section

Array = npt.NDArray[Any]

_NUMPY = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}
_BLOCK_TOKENS = 1_048_576
_READABLE = (*_NUMPY, "BF16")
_NUMBERS = ("rollout_log_probs", "old_log_probs", *WEIGHTS)
_USED = {"is-metrics": _NUMBERS, "debug-compare": (*LOG_PROBS, "responses")}
_SENTINELS = (0.0, 1.0, -1.0, -100.0, -9999.0)
_SHARE_OF_SENTINEL = 1e-3
"""A sentinel this common among valid tokens is worth a look."""
_SHARE_OF_OTHER = 1e-2
"""So is any other value, equal to the last bit; values on a bf16 grid recur, but not as often."""


def values_of(file: SafetensorsFile, info: TensorInfo, first: int, last: int) -> Array:
    """Rows as a numpy array; bf16, which numpy lacks, as float32."""
    raw = file.read(info.name, first, last)
    shape = (last - first, *info.shape[1:])
    if info.dtype == "BF16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    return raw.view(_NUMPY[info.dtype]).reshape(shape)


def inspect_file(path: str, overrides: dict[str, str]) -> dict[str, Any]:
    """Fields, metadata, padding, lengths, values that do not belong, and what the commands can do with it."""
    file = SafetensorsFile(path)
    notes: list[str] = []
    roles: dict[str, tuple[str, str]] = {}
    unclear: set[str] = set()
    for canonical in ALIASES:
        try:
            found = resolve(canonical, file.tensors, overrides, file.path)
        except AuditError as problem:
            notes.append("; ".join(text for text in (problem.what, problem.found, problem.do) if text))
            unclear.add(canonical)
            continue
        if found is not None:
            roles[canonical] = found
    role_of = {name: (canonical, why) for canonical, (name, why) in roles.items()}
    tensors = []
    for name, info in sorted(file.tensors.items()):
        role, why = role_of.get(name, (None, None))
        shape = list(info.shape)
        tensors.append({"name": name, "dtype": info.dtype, "shape": shape, "canonical": role, "why": why})
    infos = {canonical: file.tensors[name] for canonical, (name, _) in roles.items()}
    padded = next((infos[name].shape for name in (*_NUMBERS, "responses") if name in infos), None)
    result: dict[str, Any] = {"path": file.path, "tensors": tensors, "metadata": file.metadata}
    if padded is not None and len(padded) != 2:
        notes.append(f"shape {list(padded)} is not [sequences, tokens]: values were not looked at")
    result["rows"] = _rows(file, infos, padded, notes) if padded is not None and len(padded) == 2 else None
    file.check_unchanged()
    result["commands"] = {command: _can(command, infos, unclear) for command in _USED}
    result["notes"] = notes
    return result


def _can(command: str, infos: dict[str, TensorInfo], unclear: set[str]) -> str:
    """ "yes", or what is missing or does not fit."""
    if doubtful := [name for name in (*_USED[command], "response_mask") if name in unclear]:
        return f"no: which tensor is {doubtful[0]} is not clear (--field)"
    if misfit := _misfit(command, infos):
        return f"no: {misfit}"
    pair = [name for name in ("rollout_log_probs", "old_log_probs") if name not in infos]
    has_mask = "response_mask" in infos or "attention_mask" in infos
    if command == "debug-compare":
        if pair:
            return f"no: {' and '.join(pair)} missing (a second file can have it)"
        return "yes" if has_mask else "yes, over all tokens: there is no mask"
    if "old_log_probs" in pair and "rollout_is_weights" not in infos:
        return f"no: {' and '.join(pair)} missing"
    if not has_mask:
        return "no: response_mask missing (--all-tokens counts padding too)"
    if not pair:
        return "yes"
    if "rollout_is_weights" in infos:
        raw = "" if "raw_rollout_is_weights" in infos else "; high and low fractions need raw_rollout_is_weights"
        return f"weights only: no log-probs of both sides{raw}"
    return "train-side perplexity only: rollout_log_probs missing"


def _misfit(command: str, infos: dict[str, TensorInfo]) -> str:
    """Why the command would refuse what is there; empty when it would not."""
    used = {name: infos[name] for name in _USED[command] if name in infos}
    for name, info in used.items():
        if len(info.shape) != 2:
            return f"{info.name} has shape {list(info.shape)}, not [sequences, tokens]"
        if info.dtype not in (FLOATS if name in _NUMBERS else _READABLE):
            return f"{info.name} is {info.dtype}"
    first = next(iter(used.values()), None)
    if first is None:
        return ""
    for info in used.values():
        if info.shape != first.shape:
            return f"shapes differ: {first.name} {list(first.shape)}, {info.name} {list(info.shape)}"
    mask = next((name for name in ("response_mask", "attention_mask") if name in infos), None)
    exactly = command == "is-metrics" and mask == "response_mask"
    if mask is not None and not _mask_fits(infos[mask], first.shape, exactly):
        return f"{infos[mask].name} is {infos[mask].dtype} {list(infos[mask].shape)}"
    return ""


def _mask_fits(mask: TensorInfo, shape: tuple[int, ...], exactly: bool = False) -> bool:
    """Whether the mask has these rows and, unless it must fit exactly, at least these columns."""
    if len(mask.shape) != 2 or mask.shape[0] != shape[0] or mask.dtype not in _READABLE:
        return False
    return mask.shape[1] == shape[1] if exactly else mask.shape[1] >= shape[1]


class _ValueCounts:
    """Of one field: not-finite values inside and outside the mask, and values that recur to the last bit."""

    def __init__(self) -> None:
        self.inside, self.outside, self.tokens = 0, 0, 0
        self.low, self.high = np.inf, -np.inf
        self.same = dict.fromkeys(_SENTINELS, 0)

    def update(self, values: Array, valid: npt.NDArray[np.bool_]) -> None:
        with np.errstate(invalid="ignore"):  # a signalling NaN, as memory nobody wrote may hold
            values = values.astype("f8", copy=False)
        finite = np.isfinite(values)
        self.inside += int(np.count_nonzero(~finite & valid))
        self.outside += int(np.count_nonzero(~finite & ~valid))
        kept = values[valid & finite]
        if not self.tokens:
            recurring, counts = np.unique(kept[:65_536], return_counts=True)
            often = recurring[counts > max(1, _SHARE_OF_OTHER * min(kept.size, 65_536))]
            self.same |= {float(value): 0 for value in often if float(value) not in self.same}
        self.tokens += int(np.count_nonzero(valid))
        if kept.size:
            self.low, self.high = min(self.low, float(kept.min())), max(self.high, float(kept.max()))
        for value in self.same:
            self.same[value] += int(np.count_nonzero(kept == value))

    @staticmethod
    def _share(value: float) -> float:
        return _SHARE_OF_SENTINEL if value in _SENTINELS else _SHARE_OF_OTHER

    def as_dict(self) -> dict[str, Any]:
        common = {
            f"{value:g}": count
            for value, count in self.same.items()
            if count > 1 and count >= self.tokens * self._share(value)
        }
        return {
            "min": float(self.low) if self.low <= self.high else None,
            "max": float(self.high) if self.low <= self.high else None,
            "nonfinite_valid": self.inside,
            "nonfinite_padding": self.outside,
            "repeated_values": common,
        }


def _rows(
    file: SafetensorsFile, infos: dict[str, TensorInfo], shape: tuple[int, ...], notes: list[str]
) -> dict[str, Any]:
    rows, width = shape
    mask = next((infos[name] for name in ("response_mask", "attention_mask") if name in infos), None)
    if mask is not None and not _mask_fits(mask, shape):
        notes.append(f"{mask.name} {list(mask.shape)} {mask.dtype} does not fit {rows} rows of {width}: not used")
        mask = None
    counts = {name: _ValueCounts() for name in _NUMBERS if _readable(infos.get(name), shape)}
    lengths: list[npt.NDArray[np.int64]] = []
    padding: set[str] = set()
    not_binary = 0
    looked_at = [info.name for info in (mask, *(infos[name] for name in counts)) if info is not None]
    for first, last in row_blocks(rows, width, _BLOCK_TOKENS):
        file.prefetch([(name, first, last) for name in looked_at])
        if mask is None:
            values = np.ones((last - first, width), "u1")
        else:
            values = values_of(file, mask, first, last)[:, mask.shape[1] - width :]
        valid = values != 0
        not_binary += int(np.count_nonzero(valid & (values != 1)))
        lengths.append(valid.sum(1))
        padding |= _padding(valid, lengths[-1])
        for name, counter in counts.items():
            counter.update(values_of(file, infos[name], first, last), valid)
    all_lengths = np.concatenate(lengths) if lengths else np.zeros(0, "i8")
    filled = all_lengths[all_lengths > 0]
    if not_binary:
        notes.append(f"{not_binary:,} mask values are neither 0 nor 1")
    return {
        "sequences": rows,
        "width": width,
        "mask": mask.name if mask is not None else None,
        "empty_sequences": int(np.count_nonzero(all_lengths == 0)),
        "valid_tokens": int(all_lengths.sum()),
        "length_min": int(filled.min()) if filled.size else None,
        "length_median": float(np.median(filled)) if filled.size else None,
        "length_max": int(filled.max()) if filled.size else None,
        "padding": sorted(padding) or ["none"],
        "values": {name: counter.as_dict() for name, counter in counts.items()},
    }


def _readable(info: TensorInfo | None, shape: tuple[int, ...]) -> bool:
    return info is not None and info.shape == shape and info.dtype in _READABLE


def _padding(valid: npt.NDArray[np.bool_], lengths: Array) -> set[str]:
    """Which kinds of padding occur in these rows: right, left, holes."""
    kinds: set[str] = set()
    filled = (lengths > 0) & (lengths < valid.shape[1])
    if not filled.any():
        return kinds
    rows, n = valid[filled], lengths[filled]
    first = rows.argmax(1)
    last = rows.shape[1] - 1 - rows[:, ::-1].argmax(1)
    if (first > 0).any():
        kinds.add("left")
    if (last < rows.shape[1] - 1).any():
        kinds.add("right")
    if (last - first + 1 > n).any():
        kinds.add("holes")
    return kinds


def totals(files: list[dict[str, Any]]) -> Section:
    """Counts over all files, for gates."""
    rows = [file["rows"] for file in files if file["rows"]]
    sequences, tokens = sum(r["sequences"] for r in rows), sum(r["valid_tokens"] for r in rows)
    padding = sum(r["sequences"] * r["width"] for r in rows) - tokens
    values = [counts for r in rows for counts in r["values"].values()]
    return Section(
        audited={
            "num_sequences": Audited(sequences, sequences, "sequences"),
            "num_empty_sequences": Audited(sum(r["empty_sequences"] for r in rows), sequences, "sequences"),
            "num_valid_tokens": Audited(tokens, tokens, TOKENS),
            "num_nonfinite_values": Audited(sum(v["nonfinite_valid"] for v in values), tokens, TOKENS),
            "num_nonfinite_padding": Audited(
                sum(v["nonfinite_padding"] for v in values), padding, "positions of padding"
            ),
        }
    )
