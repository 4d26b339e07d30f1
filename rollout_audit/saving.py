"""States on disk, what --save-state writes and `merge` reads: a few KB of safetensors and up to 128 KB of
largest weights.

Tensors of the state are tensors of the file; everything else is JSON in the header's metadata:

    format    "rollout-audit state"      version   STATE_VERSION      tool      the version that wrote it
    state     {"command", "settings", "options", "inputs", "notes", "coverage", "clean", "as_is", "cleaned"}

In the JSON an object of a class of ours is {"class": NAME, "fields": {...}}, a tensor {"tensor": NAME}; float64 round
trips exactly. Only the classes in _CLASSES are ever made: a state is read like any other untrusted file.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rollout_audit import __version__, quantiles, stats, tails
from rollout_audit.config import RejectionRule, Settings
from rollout_audit.errors import AuditError
from rollout_audit.metrics import coverage, debug, importance, offpolicy, rejection, roundoff, rows, trend
from rollout_audit.readers.paths import natural_key
from rollout_audit.readers.safetensors_file import SafetensorsFile
from rollout_audit.state import AuditState, Families

FORMAT = "rollout-audit state"
STATE_VERSION = "4"

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        stats.Moments, stats.Mean, stats.Extremes, stats.Fraction, stats.CoMoments, stats.LogSumExp,
        quantiles.SmallSample, quantiles.Quantiles, stats.Worst, stats.TopK, stats.Pending, tails.Tail,
        RejectionRule, Families, coverage.Coverage, coverage.FileCounts, coverage.WeightsCheck, debug.DebugCompare,
        importance.Importance,
        offpolicy.OffPolicy, offpolicy.TokenDivergence, rejection.Rejection, rejection.RuleStatistics,
        roundoff.Layout, roundoff.Rows, rows.RowSample, rows.SampledRows, trend.Trend, trend.FileDifference,
    )
}  # fmt: skip
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.uint16, torch.uint32, torch.uint64,
)}  # fmt: skip
_KINDS: dict[str, type[Any]] = {
    "coverage": coverage.Coverage, "sample": rows.RowSample, "trend": trend.Trend,
}  # fmt: skip
_PARTS = ("coverage", "sample", "trend", "clean", "as_is", "cleaned")


def save_state(state: AuditState, path: str) -> None:
    """Write a state: to a temporary name first, so that a broken write leaves nothing behind."""
    tensors: dict[str, Tensor] = {}
    if state.sample is not None:
        state.sample.settle()
    document = {
        "command": state.command,
        "settings": state.settings.as_dict() | {"top": state.settings.top},
        "options": state.options,
        "inputs": state.inputs,
        "notes": state.notes,
        "left_out": state.left_out,
        **{part: _encode(getattr(state, part), tensors) for part in _PARTS},
    }
    metadata = {"format": FORMAT, "version": STATE_VERSION, "tool": __version__, "state": json.dumps(document)}
    if os.path.lexists(path) and not _is_state(path):
        raise AuditError("not overwritten: it is there and is not a saved state", path=path, do="choose another name")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise AuditError("no such folder", path=folder, do="make it first: the state goes there")
    try:
        handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=folder)
        os.close(handle)
    except OSError as exc:
        raise AuditError(f"the state cannot be written: {exc.strerror}", path=path) from None
    try:
        save_file(tensors, temporary, metadata)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as exc:
        raise AuditError(f"the state cannot be written: {exc.strerror}", path=path) from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _is_state(path: str) -> bool:
    """Whether a state may be written over it: never over a dump, a link or a device."""
    if not os.path.isfile(path) or os.path.islink(path):
        return False
    try:
        return SafetensorsFile(path).metadata.get("format") == FORMAT
    except AuditError:
        return False


def load_state(path: str) -> AuditState:
    """Read a state. Raises AuditError for any other file, another version, and a damaged one."""
    file = SafetensorsFile(path)
    path = file.path
    if file.metadata.get("format") != FORMAT:
        raise AuditError(
            "not a saved state",
            path=path,
            wanted="a file written by --save-state",
            found=f"a safetensors file with {len(file.tensors)} tensors",
        )
    if file.metadata.get("version") != STATE_VERSION:
        raise AuditError(
            "a state of another version",
            path=path,
            wanted=f"version {STATE_VERSION}",
            found=f"version {file.metadata.get('version')}, written by rollout-audit {file.metadata.get('tool')}",
            do="save it again with this version",
        )
    file.prefetch([(name, 0, None) for name in file.tensors])
    try:
        state = _decode_state(json.loads(file.metadata["state"]), file)
        AuditState(state.command, state.settings).merge(state)  # numbers where numbers belong, or it fails here
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, RuntimeError) as exc:
        raise AuditError(f"a damaged state ({type(exc).__name__}: {exc})", path=path, do="save it again") from None
    file.check_unchanged()
    return state


def merge_states(paths: list[str]) -> AuditState:
    """One state of several. Raises AuditError, by name, for other settings, other commands or a file counted twice."""
    total = load_state(paths[0])
    first = _description(total)
    for path in paths[1:]:
        state = load_state(path)
        for name, value in _description(state).items():
            if value != first[name]:
                raise AuditError(f"a state of another kind: {name} differs", path=path,
                                 wanted=f"{first[name]} ({paths[0]})", found=str(value))  # fmt: skip
        twice = {item["path"] for item in total.inputs} & {item["path"] for item in state.inputs}
        if twice:
            raise AuditError(f"{sorted(twice)[0]} was counted in another state already", path=path,
                             do="merge each state once; save states of different files")  # fmt: skip
        total.merge(state)
    total.inputs.sort(key=lambda item: natural_key(item["counted_as"]))
    return total


def _description(state: AuditState) -> dict[str, Any]:
    return {"command": state.command, **state.settings.as_dict(), "top": state.settings.top, **state.options}


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor) and value.dim() == 1 and 4 * int(torch.count_nonzero(value)) < value.numel():
        filled = torch.nonzero(value).reshape(-1)  # a histogram: most bins are empty
        return {"sparse": [_encode(x.reshape(-1, 1), tensors) for x in (filled, value[filled])], "size": value.numel()}
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.cpu().clone(memory_format=torch.contiguous_format)  # parts may share memory
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, Settings):
            return {"settings": True}
        if isinstance(value, quantiles.SmallSample):
            value = quantiles.SmallSample(value.limit, value.values_NK, value.count)
        if isinstance(value, tails.Tail):
            value = value.compact()
        inner = {f.name: _encode(getattr(value, f.name), tensors) for f in fields(value) if f.init}
        return {"class": type(value).__name__, "fields": inner}
    if isinstance(value, dict):
        return {"dict": {key: _encode(item, tensors) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return [_encode(item, tensors) for item in value]
    return value


class _Decoder:
    def __init__(self, file: SafetensorsFile, settings: Settings) -> None:
        self.file, self.settings = file, settings

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return self.tensor(value["tensor"])
        if "sparse" in value:
            filled, values = (self.decode(part).reshape(-1) for part in value["sparse"])
            return torch.zeros(value["size"], dtype=values.dtype).index_put((filled,), values)
        if "dtype" in value:
            return _DTYPES[value["dtype"]]
        if "settings" in value:
            return self.settings
        if "dict" in value:
            return {key: self.decode(item) for key, item in value["dict"].items()}
        cls = _CLASSES[value["class"]]
        inner = {name: self.decode(item) for name, item in value["fields"].items()}
        if cls is stats.Worst:
            inner["values"] = tuple(inner["values"])
        return cls(**inner)

    def tensor(self, name: str) -> Tensor:
        info = self.file.tensors[name]
        dtype = {"F64": torch.float64, "I64": torch.int64, "F32": torch.float32}[info.dtype]
        raw = self.file.read(name)
        # A view of nothing has no stride to be taken as numbers.
        return (
            torch.from_numpy(raw).view(dtype).reshape(info.shape) if raw.size else torch.empty(info.shape, dtype=dtype)
        )


def _decode_state(document: dict[str, Any], file: SafetensorsFile) -> AuditState:
    settings = Settings(**document["settings"])
    decoder = _Decoder(file, settings)
    state = AuditState(document["command"], settings)
    for name in ("options", "inputs", "notes", "left_out"):
        setattr(state, name, document[name])
    for part in _PARTS:
        value = decoder.decode(document[part])
        optional = value is None and getattr(state, part) is None
        if not optional and not isinstance(value, _KINDS.get(part, Families)):
            raise TypeError(f"{part} is a {type(value).__name__}")
        setattr(state, part, value)
    return state
