"""The columns of the address table, and the codes of dtypes in it.

It does not import Triton, so that the native module can use the same table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

ADDRESS_COLUMNS: Final[tuple[str, ...]] = (
    "weight",  # address of the first element; 0 for an absent shard
    "weight_code",
    "weight_offsets",  # address of this row's slots in an offset table
    "grad",  # 0 when there is no gradient
    "grad_code",
    "grad_offsets",  # the weight's, unless the strides differ
)
ADDRESS: Final[dict[str, int]] = {name: i for i, name in enumerate(ADDRESS_COLUMNS)}

DTYPE_CODES: Final[dict[torch.dtype, int]] = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}


def dtype_code(dtype: torch.dtype) -> int:
    """Return the code of a dtype; raise TypeError for one that the kernels cannot read."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPE_CODES)
        raise TypeError(f"the kernels read {known}, not {str(dtype).removeprefix('torch.')}")
    return code


def dtype_set(dtypes: Iterable[torch.dtype]) -> int:
    """Return the DTYPES constexpr of a kernel: one bit per dtype in its address table."""
    bits = 0
    for dtype in dtypes:
        bits |= 1 << dtype_code(dtype)
    return bits
