"""The kernel that counts NaN and Inf, interpreted, against plain torch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from csrc_triton.address_layout import ADDRESS, ADDRESS_COLUMNS, DTYPE_CODES, dtype_set
from csrc_triton.nonfinite_counts import BLOCK, CHUNK, count_nonfinite

pytestmark = pytest.mark.usefixtures("launches")
SIZES = (1, 7, BLOCK, BLOCK + 5, CHUNK, CHUNK + BLOCK + 3, 0)


def spoiled(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers with NaN and Inf at the ends of chunks and elsewhere; not aligned to 16 bytes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size + 1, generator=generator, dtype=torch.float64)
    where = torch.randint(0, size + 1, (max(1, size // 50),), generator=generator)
    kinds = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    x[where] = kinds[torch.randint(0, 4, where.shape, generator=generator)].double()
    x[[0, -1]] = torch.tensor([torch.inf, torch.nan], dtype=torch.float64)
    return x.to(dtype)[1:]


def expected(tensor: torch.Tensor | None) -> list[int]:
    if tensor is None:
        return [0, 0]
    x = tensor.float() if tensor.element_size() == 1 else tensor
    return [int(x.isnan().sum()), int(x.isinf().sum())]


@pytest.mark.parametrize(
    ("dtypes", "value"),
    [
        ([torch.float32], torch.float32),
        ([torch.bfloat16, torch.float32], torch.float32),
        ([*DTYPE_CODES], torch.float64),
    ],
)
def test_counts_are_those_of_torch(
    dtypes: list[torch.dtype], value: torch.dtype, launches: Counter[str]
) -> None:
    weights, grads = [], []
    for i, size in enumerate(SIZES):
        weights.append(spoiled(size, dtypes[i % len(dtypes)], i))
        grads.append(None if i == 3 else spoiled(size, dtypes[(i + 1) % len(dtypes)], 100 + i))
    table = torch.zeros((len(SIZES), len(ADDRESS_COLUMNS)), dtype=torch.int64)
    for row, pair in enumerate(zip(weights, grads, strict=True)):
        for what, tensor in zip(("weight", "grad"), pair, strict=True):
            if tensor is not None:
                table[row, ADDRESS[what]] = tensor.data_ptr()
                table[row, ADDRESS[f"{what}_code"]] = DTYPE_CODES[tensor.dtype]
    launches.clear()
    counts = count_nonfinite(table, SIZES, dtype_set(dtypes), value)
    assert launches["nonfinite_counts_kernel"] == 1
    wanted = [[*expected(w), *expected(g)] for w, g in zip(weights, grads, strict=True)]
    assert counts.tolist() == wanted
    assert sum(map(sum, wanted)) > 1000


def test_what_a_kernel_would_assume_is_checked() -> None:
    table = torch.zeros((2, len(ADDRESS_COLUMNS)), dtype=torch.int64)
    with pytest.raises(TypeError, match="float32 or float64"):
        count_nonfinite(table, (1, 1), 1, torch.float16)
    with pytest.raises(ValueError, match="1 sizes for 2 rows"):
        count_nonfinite(table, (1,), 1, torch.float32)
    with pytest.raises(TypeError, match="addresses must be"):
        count_nonfinite(table.int(), (1, 1), 1, torch.float32)
    assert not count_nonfinite(table, (0, 0), 1, torch.float32).any()
