"""The denominators of verl's masked_mean, in the precision verl gets them.

verl 0.9.1 divides by `mask.sum() + 1e-8` (verl/utils/torch_functional.py). For integer and bool masks torch makes
that sum float32, where 1e-8 vanishes (and whole numbers above 2**24 are rounded); for a float64 mask it stays; a
bfloat16 or float16 mask rounds the count itself, from 257 or 2,049 on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def guarded_count(count: float, mask_dtype: torch.dtype) -> float:
    """mask.sum() + 1e-8 for a 0/1 mask with `count` ones."""
    dtype = mask_dtype if mask_dtype.is_floating_point else torch.int64
    return float(torch.tensor(count, dtype=torch.float64).to(dtype) + 1e-8)


def guarded_lengths(lengths_B: Tensor, mask_dtype: torch.dtype) -> Tensor:
    """mask.sum(-1) + 1e-8, as float64."""
    dtype = mask_dtype if mask_dtype.is_floating_point else torch.int64
    return (lengths_B.to(dtype) + 1e-8).double()


def token_fraction(hits: int, count: float, mask_dtype: torch.dtype) -> float:
    """masked_mean of a float32 0/1 tensor: float32, unless the mask is float64."""
    dtype = torch.promote_types(torch.float32, mask_dtype)
    guard = torch.tensor(guarded_count(count, mask_dtype), dtype=dtype)
    return float(torch.tensor(float(hits), dtype=dtype) / guard)


def row_fraction(hits: int, count: int) -> float:
    """`x.float().mean()`: a share, rounded to float32."""
    return float(torch.tensor(float(hits), dtype=torch.float32) / count)
