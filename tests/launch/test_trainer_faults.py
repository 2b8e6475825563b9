"""Every planted fault does what it says, at its step, on its rank."""

from __future__ import annotations

import pytest
import torch
from bad_input import BadInput
from faults import Fault, plan_fault
from gpt import GPT, Shape


def plan(kind: str, name: str | None = None, target: int | None = None, rank: int = 1) -> Fault:
    torch.manual_seed(0)
    model = GPT(Shape(layers=4, width=16, heads=2, context=8))
    fault = plan_fault(kind, 3, name, target, model, rank, 2, 0)
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
        assert fault.parameter.grad is not None
        assert int(fault.parameter.grad.isnan().sum()) == hits


def test_frozen_drops_the_gradient_from_then_on() -> None:
    for step, dropped in [(2, False), (3, True), (9, True)]:
        fault = plan("frozen")
        fault.after_backward(step)
        assert (fault.parameter.grad is None) == dropped


def test_desync_changes_the_weight_a_little_on_one_rank() -> None:
    for rank, step, changed in [(1, 3, True), (1, 4, False), (0, 3, False)]:
        fault = plan("desync", rank=rank)
        before = fault.parameter.detach().clone()
        fault.after_step(step)
        assert torch.equal(before, fault.parameter) != changed
        assert torch.allclose(before, fault.parameter, atol=0.1 * float(before.std()))


def test_spike_replaces_the_batch_of_its_step() -> None:
    fault = plan("spike")
    batch = torch.zeros(2, 8, dtype=torch.long)
    assert fault.spoil_batch(2, batch, batch) == (batch, batch, 1.0)
    inputs, targets, scale = fault.spoil_batch(3, batch, batch)
    assert inputs.shape == batch.shape
    assert not torch.equal(inputs[:, 1:], targets[:, :-1])
    assert scale == 50


def test_bad_requests_are_one_sentence() -> None:
    with pytest.raises(BadInput, match=r'did you mean "blocks\.1\.mlp\.up\.weight"'):
        plan("nan", "blocks.1.mlp.upp.weight")
    with pytest.raises(BadInput, match="--inject-rank 2 is out of range; ranks are 0 to 1"):
        plan("nan", target=2)
    with pytest.raises(BadInput, match="needs at least 2 ranks"):
        plan_fault("desync", 3, None, None, GPT(Shape(layers=1)), 0, 1, 0)
