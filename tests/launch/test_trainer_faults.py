"""Every planted fault does what it says, at its step, on its rank."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from bad_input import BadInput
from faults import Fault, FaultRequest, plan_fault
from gpt import GPT, Shape, loss_of
from holdings import Holdings, Place, everything
from modes import Division
from torch import nn

REPLICAS = Division("ddp", replicas=2)


@dataclass(frozen=True)
class Stub:
    """What planning a fault needs of an arrangement; every rank holds a whole copy."""

    parameters: dict[str, nn.Parameter]
    holdings: Holdings
    conditions: SimpleNamespace
    ranks: SimpleNamespace

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()


def arranged(rank: int = 1, division: Division = REPLICAS) -> Stub:
    torch.manual_seed(0)
    model = GPT(Shape(layers=4, width=16, heads=2, context=8))
    parameters = dict(model.named_parameters())
    shapes = {name: each.shape for name, each in parameters.items()}
    world = division.data * division.tensor * division.stages
    places = [{name: everything(shape) for name, shape in shapes.items()} for _ in range(world)]
    return Stub(
        parameters,
        Holdings(shapes, places),
        SimpleNamespace(division=division),
        SimpleNamespace(rank=rank),
    )


def plan(kind: str, name: str | None = None, target: int | None = None, rank: int = 1) -> Fault:
    fault = plan_fault(FaultRequest(kind, 3, name, target, 0), arranged(rank))
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
        fault.after_backward(step)
        assert fault.parameter is not None
        assert fault.parameter.grad is not None
        assert int(fault.parameter.grad.isnan().sum()) == hits


def test_frozen_drops_the_gradient_from_then_on() -> None:
    for step, dropped in [(2, False), (3, True), (9, True)]:
        fault = plan("frozen")
        fault.after_backward(step)
        assert fault.parameter is not None
        assert (fault.parameter.grad is None) == dropped


@pytest.mark.parametrize("name", [None, "blocks.1.norm1.weight"])
def test_desync_changes_the_weight_a_little_on_one_rank(name: str | None) -> None:
    for rank, step, changed in [(1, 3, True), (1, 4, False), (0, 3, False)]:
        fault = plan("desync", name, rank=rank)
        assert fault.parameter is not None
        before = fault.parameter.detach().clone()
        fault.after_step(step)
        assert torch.equal(before, fault.parameter) != changed
        size = float(before.square().mean().sqrt())
        assert torch.allclose(before, fault.parameter, atol=0.1 * size)


def test_spike_replaces_the_batch_of_its_step() -> None:
    fault = plan("spike")
    batch = torch.zeros(2, 8, dtype=torch.long)
    assert fault.spoil_batch(2, batch, batch) == (batch, batch, 1.0)
    inputs, targets, scale = fault.spoil_batch(3, batch, batch)
    assert inputs.shape == batch.shape
    assert not torch.equal(inputs[:, 1:], targets[:, :-1])
    assert scale == 50


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_dead_mlp_gives_and_gets_nothing(activation: str) -> None:
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, width=16, heads=2, context=8, activation=activation))
    stub = arranged(0)
    stub.parameters.update(model.named_parameters())
    name = "blocks.1.mlp.up.weight"
    fault = plan_fault(FaultRequest("dead", 3, name, None, 0), stub)
    block, ids = model.blocks[1], torch.randint(0, 256, (4, 8))
    outputs: list[torch.Tensor] = []
    block.mlp.register_forward_hook(lambda *given: outputs.append(given[-1]))
    for step, dead in [(2, False), (3, True)]:
        fault.after_step(step)
        model.zero_grad()
        loss_of(model(ids), ids).backward()
        assert (float(outputs[-1].detach().abs().max()) == 0) == dead
        of_mlp = [block.mlp.up.weight, block.mlp.down.weight, block.norm2.weight, block.norm2.bias]
        assert [bool((each.grad == 0).all()) for each in of_mlp] == [dead] * 4
        assert bool((block.attn.out.weight.grad != 0).any())


def test_ranks_with_the_same_data_get_the_same_spike() -> None:
    division = Division("fsdp+tp", shards=2, tensor=2)
    request = FaultRequest("spike", 3, None, 2, 0)
    here = [plan_fault(request, arranged(rank, division)).here for rank in range(4)]
    assert here == [False, False, True, True]


def test_a_piece_is_hit_where_it_is() -> None:
    """Two stages: each parameter is on one rank only."""
    names = ["blocks.0.mlp.up.weight", "blocks.2.mlp.up.weight"]
    stub = arranged(0, Division("pp", stages=2))
    for name, absent in zip(names, (1, 0), strict=True):
        del stub.holdings.places[absent][name]
    for name, holder in zip(names, (0, 1), strict=True):
        fault = plan_fault(FaultRequest("nan", 3, name, None, 0), stub)
        assert (fault.target, fault.here) == (holder, holder == 0)
    sentence = r"--inject-rank 0 holds nothing of blocks\.2\.mlp.* --parallel pp; rank 1 does"
    with pytest.raises(BadInput, match=sentence):
        plan_fault(FaultRequest("frozen", 3, names[1], 0, 0), stub)


def test_desync_needs_copies() -> None:
    stub = arranged(0, Division("tp", tensor=2))
    norm = "blocks.2.norm1.weight"
    for rank, places in enumerate(stub.holdings.places):
        for name, shape in stub.holdings.shapes.items():
            if name != norm:
                half = shape[0] // 2
                places[name] = Place((half * rank,) + (0,) * len(shape[1:]), (half, *shape[1:]))
    assert plan_fault(FaultRequest("desync", 3, None, None, 0), stub).name == norm
    with pytest.raises(BadInput, match=rf"makes none of head\.weight, but of {norm}"):
        plan_fault(FaultRequest("desync", 3, "head.weight", None, 0), stub)
    del stub.holdings.shapes[norm]
    with pytest.raises(BadInput, match=r"needs copies, and --parallel tp makes none$"):
        plan_fault(FaultRequest("desync", 3, None, None, 0), stub)


def test_bad_requests_are_one_sentence() -> None:
    with pytest.raises(BadInput, match=r'did you mean "blocks\.1\.mlp\.up\.weight"'):
        plan("nan", "blocks.1.mlp.upp.weight")
    with pytest.raises(BadInput, match="--inject-rank 2 is out of range; ranks are 0 to 1"):
        plan("nan", target=2)
    with pytest.raises(BadInput, match="needs at least 2 ranks"):
        plan_fault(FaultRequest("desync", 3, None, None, 0), arranged(0, Division("ddp")))
