"""A device that is not the CPU, for machines without one: it refuses what cuda refuses, and computes on the CPU.

Its tensors say they are on "meta", a device that torch knows without hardware. Each operation is looked at: tensors of
two devices in one are refused (a number in a tensor without axes, and CPU indices, are not), and so are numpy and
float64 where it is told to have none, as mps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "meta"
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class Elsewhere(Tensor):
    """A tensor on the device; its values are in `held`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME),
        )
        return made

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor of this device to numpy")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends what is made for the device, or moved to it, there."""

    def __init__(self, has_float64: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_float64, self.calls = has_float64, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _call(func, args, kwargs or {})
        moved = [x for x in tree_flatten(result)[0] if isinstance(x, Elsewhere)]
        self.calls += bool(moved)
        if not self.has_float64 and any(x.dtype == torch.float64 for x in moved):
            raise TypeError(f"{func}: this device has no float64")
        return result


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    here = any(not isinstance(x, Elsewhere) and x.dim() for x in tensors)
    there = any(isinstance(x, Elsewhere) for x in tensors)
    moves = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if here and there and not moves and func not in _INDEXING:
        raise RuntimeError(f"{func}: tensors on two devices")
    if func in _INDEXING and not isinstance(args[0], Elsewhere) and there:
        raise RuntimeError(f"{func}: indices on the device, values on the CPU")
    wanted = kwargs.get("device")
    if wanted is not None and torch.device(wanted).type == NAME:
        kwargs, to_device = {**kwargs, "device": "cpu"}, True
    else:
        to_device = wanted is None and there
    # Nothing here is differentiated: what was asked of a tensor of the device is asked of the one that it holds.
    result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if func is torch.ops.aten.copy_.default:
        return args[0]
    return tree_map(lambda x: Elsewhere(x) if isinstance(x, Tensor) and to_device else x, result)


def _held(x: Any) -> Any:
    return x.held if isinstance(x, Elsewhere) else x


@contextmanager
def another_device(*, has_float64: bool = True) -> Iterator[_Mode]:
    """While the block runs, `device=NAME` is such a device; the answer counts operations that gave a tensor there."""
    with _Mode(has_float64) as mode:
        yield mode
