"""Every planted fault does what it says, at its step, on its rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from launch.faults import Fault, plan_fault
from launch.model import GPT, Shape, cross_entropy
from launch.options import Options
from launch.parallel.base import MicroBatch, ShardTable, Sizes
from launch.ranks import BadInput

REPLICAS = Sizes(replicas=2)


@dataclass(frozen=True)
class Stub:
    """What planning a fault needs of a parallelism; every rank holds a whole copy."""

    parameters: dict[str, nn.Parameter]
    shards: ShardTable
    sizes: Sizes
    ranks: SimpleNamespace


def distributed(rank: int = 1, sizes: Sizes = REPLICAS) -> Any:
    torch.manual_seed(0)
    model = GPT(Shape(layers=4, width=16, heads=2, context=8))
    parameters = dict(model.named_parameters())
    shapes = {name: each.shape for name, each in parameters.items()}
    world = sizes.data * sizes.tensor * sizes.stages
    counts = [{name: shape.numel() for name, shape in shapes.items()} for _ in range(world)]
    return Stub(parameters, ShardTable(shapes, counts), sizes, SimpleNamespace(rank=rank))


def options(
    kind: str, name: str | None = None, rank: int | None = None, mode: str = "ddp"
) -> Options:
    return Options(inject=kind, inject_at=3, inject_param=name, inject_rank=rank, parallel=mode)


def plan(kind: str, name: str | None = None, target: int | None = None, rank: int = 1) -> Fault:
    fault = plan_fault(options(kind, name, target), distributed(rank))
    assert fault.parameter is not None
    fault.parameter.grad = torch.ones_like(fault.parameter)
    return fault


def test_defaults_and_description() -> None:
    assert plan("nan").describe() == "injecting nan into blocks.2.mlp.up.weight on rank 1 at step 3"
    assert plan("frozen", "head.weight").describe() == (
        "injecting frozen into head.weight on all ranks from step 3"
    )


def test_nan_hits_one_element_once_on_one_rank() -> None:
    for rank, step, hits in [(1, 3, 1), (1, 2, 0), (1, 4, 0), (0, 3, 0)]:
        fault = plan("nan", rank=rank)
        fault.act("gradients", step)
        assert fault.parameter is not None
        assert fault.parameter.grad is not None
        assert int(fault.parameter.grad.isnan().sum()) == hits


def test_frozen_drops_the_gradient_from_then_on() -> None:
    for step, dropped in [(2, False), (3, True), (9, True)]:
        fault = plan("frozen")
        fault.act("gradients", step)
        assert fault.parameter is not None
        assert (fault.parameter.grad is None) == dropped


@pytest.mark.parametrize("name", [None, "blocks.1.norm1.weight"])
def test_desync_changes_the_weight_a_little_on_one_rank(name: str | None) -> None:
    for rank, step, changed in [(1, 3, True), (1, 4, False), (0, 3, False)]:
        fault = plan("desync", name, rank=rank)
        assert fault.parameter is not None
        before = fault.parameter.detach().clone()
        fault.act("weights", step)
        assert torch.equal(before, fault.parameter) != changed
        size = float(before.square().mean().sqrt())
        assert torch.allclose(before, fault.parameter, atol=0.1 * size)


def test_spike_replaces_the_batch_of_its_step() -> None:
    fault = plan_fault(options("spike"), distributed())
    ids = torch.zeros(2, 8, dtype=torch.long)
    batch = MicroBatch(ids, ids, 1.0)
    assert fault.change_batch(2, batch) is batch
    inputs, targets, scale = fault.change_batch(3, batch)
    assert inputs.shape == targets.shape == ids.shape
    assert not torch.equal(inputs[:, 1:], targets[:, :-1])
    assert scale == 50


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_dead_mlp_gives_and_gets_nothing(activation: str) -> None:
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, width=16, heads=2, context=8, activation=activation))
    stub = distributed(0)
    stub.parameters.update(model.named_parameters())
    name = "blocks.1.mlp.up.weight"
    fault = plan_fault(options("dead", name), stub)
    block, ids = model.blocks["1"], torch.randint(0, 256, (4, 8))
    outputs: list[torch.Tensor] = []
    block.mlp.register_forward_hook(lambda *given: outputs.append(given[-1]))
    for step, dead in [(2, False), (3, True)]:
        fault.act("weights", step)
        model.zero_grad()
        cross_entropy(model(ids), ids).backward()
        assert (float(outputs[-1].detach().abs().max()) == 0) == dead
        of_mlp = [block.mlp.up.weight, block.mlp.down.weight, block.norm2.weight, block.norm2.bias]
        assert [bool((each.grad == 0).all()) for each in of_mlp] == [dead] * 4
        assert bool((block.attn.out.weight.grad != 0).any())


def test_ranks_with_the_same_data_get_the_same_spike() -> None:
    sizes, spike = Sizes(shards=2, tensor=2), options("spike", rank=2, mode="fsdp+tp")
    here = [plan_fault(spike, distributed(rank, sizes)).here for rank in range(4)]
    assert here == [False, False, True, True]


def test_a_shard_is_hit_where_it_is() -> None:
    """Two stages: each parameter is on one rank only."""
    names = ["blocks.0.mlp.up.weight", "blocks.2.mlp.up.weight"]
    stub = distributed(0, Sizes(stages=2))
    for name, absent in zip(names, (1, 0), strict=True):
        del stub.shards.counts[absent][name]
    for name, holder in zip(names, (0, 1), strict=True):
        fault = plan_fault(options("nan", name, mode="pp"), stub)
        assert (fault.rank, fault.here) == (holder, holder == 0)
    sentence = r"--inject-rank 0 holds nothing of blocks\.2\.mlp.* --parallel pp; rank 1 does"
    with pytest.raises(BadInput, match=sentence):
        plan_fault(options("frozen", names[1], 0, mode="pp"), stub)


def test_desync_needs_copies() -> None:
    stub, desync = distributed(0, Sizes(tensor=2)), options("desync", mode="tp")
    norm = "blocks.2.norm1.weight"
    for counts in stub.shards.counts:
        for name, shape in stub.shards.shapes.items():
            if name != norm:
                counts[name] = shape.numel() // 2
    assert plan_fault(desync, stub).name == norm
    with pytest.raises(BadInput, match=rf"makes none of head\.weight, but of {norm}"):
        plan_fault(options("desync", "head.weight", mode="tp"), stub)
    del stub.shards.shapes[norm]
    with pytest.raises(BadInput, match=r"needs copies, and --parallel tp makes none$"):
        plan_fault(desync, stub)


def test_frozen_on_one_holder_of_a_sharded_parameter_needs_a_state_to_save() -> None:
    """A collective over the state of a parameter would wait for the rank that has none."""
    stub = distributed(0, Sizes(shards=2))
    for counts in stub.shards.counts:
        for name in counts:
            counts[name] //= 2
    frozen = options("frozen", rank=1, mode="fsdp")
    assert plan_fault(frozen, stub).rank == 1
    with pytest.raises(BadInput, match="needs --inject-at 2 or later"):
        plan_fault(replace(frozen, inject_at=1), stub)


def test_bad_requests_are_one_sentence() -> None:
    with pytest.raises(BadInput, match=r'did you mean "blocks\.1\.mlp\.up\.weight"'):
        plan("nan", "blocks.1.mlp.upp.weight")
    with pytest.raises(BadInput, match="--inject-rank 2 is out of range; ranks are 0 to 1"):
        plan("nan", target=2)
    with pytest.raises(BadInput, match="needs at least 2 ranks"):
        plan_fault(options("desync"), distributed(0, Sizes()))
