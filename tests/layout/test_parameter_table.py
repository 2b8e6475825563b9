"""The parameter table, merged from the shards of all ranks."""

from __future__ import annotations

import pytest
import torch

from distmon.errors import PlanMismatchError
from distmon.layout import capture
from distmon.layout.parameter_table import Entry, complete, merge


def _entries(*names: str, shape: tuple[int, ...] = (2, 2)) -> list[Entry]:
    return [Entry(name, shape, "float32", True, False) for name in names]


def test_interleaved_stages_are_merged_in_layer_order() -> None:
    first = _entries("embed.w", "blocks.0.a", "blocks.0.b", "blocks.4.a", "blocks.4.b")
    second = _entries("blocks.2.a", "blocks.2.b", "blocks.10.a", "norm.w", "head.w")
    assert [e.name for e in merge({0: first, 1: second})] == [
        "embed.w",
        "blocks.0.a",
        "blocks.0.b",
        "blocks.2.a",
        "blocks.2.b",
        "blocks.4.a",
        "blocks.4.b",
        "blocks.10.a",
        "norm.w",
        "head.w",
    ]


def test_parameters_of_several_ranks_are_listed_once() -> None:
    shared = merge({0: _entries("a", "b"), 2: _entries("b", "c")})
    assert [e.name for e in shared] == ["a", "b", "c"]


def test_mismatched_shapes_under_one_name_raise() -> None:
    with pytest.raises(PlanMismatchError, match=r"^0\.w is float32 \(2, 2\) on rank 0 and float3"):
        merge({0: _entries("0.w"), 3: _entries("0.w", shape=(2, 3))})


def test_parameters_of_other_ranks_become_absent_shards() -> None:
    mine = capture(torch.nn.Linear(2, 2, bias=False))
    shards = complete(_entries("weight", "other"), mine, torch.device("cpu"))
    assert shards[0] is mine[0]
    assert shards[1].name == "other"
    assert shards[1].weight().numel() == 0
    assert shards[1].grad() is None
    assert shards[1].parameter is None
