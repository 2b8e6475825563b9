"""The samples of all ranks together are the global sample, for world sizes of 8 to 4096."""

from __future__ import annotations

import itertools
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_python import fork_server
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from distmon import layout
from distmon.layout import capture
from distmon.layout.shard import Shard, region_of_box
from distmon.sampling.sample import choose


class Block(nn.Module):
    """One block in the shape of a 7B Llama, and a small expert; never run."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4096, 4096, bias=False)
        self.up = nn.Linear(4096, 11008, bias=False)
        self.down = nn.Linear(11008, 4096, bias=False)
        self.norm = nn.RMSNorm(4096)
        self.expert = nn.Linear(96, 40, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 4096)
        self.block = Block()
        self.odd = nn.Linear(7, 13, bias=False)


def _distribute(model: Model, parallelism: str, world: int) -> None:
    if parallelism == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    elif parallelism == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
    else:
        both = init_device_mesh("cpu", (world // 4, 4), mesh_dim_names=("dp", "tp"))
        plan = {"q": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model.block, both["tp"], plan)
        mesh = both["dp"]
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _check(parallelism: str, worlds: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """Run in a separate process, because the default process group is global state."""
    found = {}
    for world in worlds:
        rank = world - world // 3
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        found[world] = _held(parallelism, world)
        dist.destroy_process_group()
    return found


def _held(parallelism: str, world: int) -> dict[str, Any]:
    """Return (min, max, ranks of the mesh, sample size) of the replicas of each parameter."""
    with torch.device("meta"):
        model = Model()
    _distribute(model, parallelism, world)
    shards = {shard.name: shard for shard in capture(model)}
    held: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        mesh, placements = parameter.device_mesh, parameter.placements
        shape = tuple(parameter.shape)
        sample = choose(name, parameter.numel(), 1024, 0)
        times = np.zeros(sample.count, dtype=np.int64)
        coordinates = [*itertools.product(*map(range, mesh.shape))]
        if mesh.size() > 64 and any(isinstance(p, _StridedShard) for p in placements):
            # torch takes 30 ms for each of these, so three of them are compared with the
            # definition: the rows of the tensor-parallel rank, sharded over data-parallel ranks.
            for at in (coordinates[0], coordinates[1000], coordinates[-1]):
                size, offset = _compute_local_shape_and_global_offset(
                    shape, mesh.shape, list(at), placements
                )
                rows = torch.arange(shape[0]).chunk(mesh.shape[1])[at[1]].chunk(mesh.shape[0])
                mine = rows[at[0]] if at[0] < len(rows) else rows[0][:0]
                assert size[0] == len(mine)
                assert not size[0] or offset[0] == int(mine[0])
            continue
        for coordinate in coordinates:
            size, offset = _compute_local_shape_and_global_offset(
                shape, mesh.shape, list(coordinate), placements
            )
            empty = not all(size)
            region = region_of_box(shape, (0,) * len(shape) if empty else offset, size)
            if coordinate == tuple(mesh.get_coordinate()):
                assert shards[name].region == region, name
            times += region.local(sample.indices) >= 0
        held[name] = (times.min(), times.max(), mesh.size(), sample.count)
    return held


@pytest.mark.parametrize("parallelism", ["fsdp", "hsdp", "fsdp+tp"])
def test_every_sampled_element_is_held_by_the_same_number_of_ranks(parallelism: str) -> None:
    worlds = (8, 64, 4096) if parallelism == "fsdp+tp" else (8, 4096)
    with fork_server().Pool(1) as pool:
        found = pool.apply(_check, (parallelism, worlds))
    for world, held in found.items():
        assert len(held) == (5 if (parallelism, world) == ("fsdp+tp", 4096) else 7)
        for name, (least, most, ranks, count) in held.items():
            # Replicated over the tensor-parallel ranks without being placed on them.
            implicit = world // ranks
            assert least == most, (name, world)
            assert least in ((2,) if parallelism == "hsdp" else (1, 4)), (name, world)
            assert implicit in (1, 4)
            assert count > 0


def _objects_by_shape() -> dict[str, int]:
    """Return how many objects 40 parameters of two shapes have for what they have in common."""
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(96, 40) for _ in range(20)])
    fully_shard(model)
    shards = capture(model)
    dist.destroy_process_group()
    return {
        what: len({id(getattr(shard, what)) for shard in shards})
        for what in ("global_shape", "region", "sharding", "paths", "model")
    }


def test_parameters_of_one_shape_share_what_they_have_in_common() -> None:
    with fork_server().Pool(1) as pool:
        found = pool.apply(_objects_by_shape)
    assert found == {"global_shape": 2, "region": 2, "sharding": 2, "paths": 1, "model": 1}


def test_no_kind_of_shard_has_a_dictionary() -> None:
    """It would be larger than the rest of the shard, 100 000 times."""
    kinds: set[type[Shard]] = set()
    for path in Path(layout.__file__).parent.rglob("*.py"):
        parts = path.relative_to(Path(layout.__file__).parents[2]).with_suffix("").parts
        defined = vars(import_module(".".join(parts))).values()
        kinds |= {each for each in defined if isinstance(each, type) and issubclass(each, Shard)}
    assert len(kinds) > 10
    assert {kind.__name__ for kind in kinds if kind.__dictoffset__} == set()
