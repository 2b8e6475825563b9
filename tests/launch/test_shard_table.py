"""Who holds what, from the number of elements that each rank holds."""

from __future__ import annotations

import torch

from launch.parallel.base import ShardTable

SHAPE = torch.Size((4, 3))


def test_copies_and_holders() -> None:
    """Two replicas of two uneven shards, a parameter that only rank 3 has, and an empty shard."""
    counts = [{"w": 9, "b": 0}, {"w": 3}, {"w": 9}, {"w": 3, "b": 12}]
    table = ShardTable({"w": SHAPE, "b": SHAPE}, counts)
    assert table.copies("w") == 2
    assert table.copies("b") == 1
    assert table.holders("w") == [0, 1, 2, 3]
    assert table.holders("b") == [3]
