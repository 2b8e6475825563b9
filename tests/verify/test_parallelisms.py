"""Every parallelism trains like the unsharded model when no monitor is attached.

`distmon verify` attributes differences to the monitor, so the training itself must have none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from distmon.errors import ConfigError
from distmon.layout.names import clean_name
from distmon.verify.parallelisms import PARALLELISMS, PLAIN, Parallelism, Workload, select
from distmon.verify.parallelisms.example_model import example_workload

STEPS = 2


def _train(parallelism: Parallelism) -> tuple[list[float | None], dict[str, torch.Tensor], int]:
    """Return this rank's losses, the unsharded weights, and the number of partial gradients."""
    torch.manual_seed(0)
    distributed = parallelism.build(example_workload())
    losses: list[float | None] = []
    for step in range(1, STEPS + 1):
        for module in distributed.modules:
            module.zero_grad()
        loss = distributed.backward(step)
        losses.append(None if loss is None else float(loss))
        gradients = [p.grad for m in distributed.modules for p in m.parameters()]
        partial_gradients = sum(
            any(placement.is_partial() for placement in getattr(gradient, "placements", ()))
            for gradient in gradients
        )
        for optimizer in distributed.optimizers:
            optimizer.step()
    weights = {}
    for module in distributed.modules:
        whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
        weights |= {clean_name(name): value.clone() for name, value in whole.items()}
    return losses, weights, partial_gradients


# One of each kind; `distmon verify` compares the weights of all of them with the unsharded ones.
KINDS = ("ddp-accumulate", "zero-redundancy", "fsdp1-full-flat", "fsdp", "tp-sequence", "pp")


def _train_all(_: int, ranks: int) -> dict[str, Any]:
    assert not any(PARALLELISMS[name].unsupported_reason(ranks) for name in KINDS)
    return {name: _train(PARALLELISMS[name]) for name in KINDS}


def test_trained_like_the_unsharded_model() -> None:
    losses, weights, _ = _train(PLAIN)
    results = run_ranks(_train_all, 2)
    for name in results[0]:
        merged: dict[str, torch.Tensor] = {}
        for _, found, _ in (result[name] for result in results):
            merged |= found
        assert merged.keys() == weights.keys(), name
        for parameter, value in merged.items():
            assert (value - weights[parameter]).abs().max() <= 1e-12, (name, parameter)
        reported = [result[name][0] for result in results if result[name][0][0] is not None]
        mean = torch.tensor(reported, dtype=torch.float64).mean(0)
        torch.testing.assert_close(
            mean, torch.tensor(losses, dtype=torch.float64), rtol=1e-12, atol=0
        )
    # The case of partial gradients is covered.
    assert results[0]["tp-sequence"][2] > 0


def test_the_built_in_model_covers_the_corner_cases() -> None:
    sizes = {name: p.numel() for name, p in example_workload().model.named_parameters()}
    shapes = [p.shape for p in example_workload().model.parameters()]
    assert max(sizes.values()) > 1024 > min(sizes.values())
    assert any(shape[0] % 2 for shape in shapes)
    assert any(shape[0] < 2 for shape in shapes)


def test_names_globs_and_order() -> None:
    names = [a.name for a in select("pp, ddp*")]
    assert names == [n for n in PARALLELISMS if n.startswith("ddp") or n == "pp"]
    assert len(select("*")) == len(PARALLELISMS)
    assert [a.name for a in select("fsdp+tp")] == ["fsdp+tp"]
    with pytest.raises(ConfigError, match="did you mean"):
        select("zero-redundanc")


def test_units_are_the_children_unless_they_share_parameters() -> None:
    class Model(nn.Module):
        def __init__(self, share: bool) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)])
            self.gain = nn.Parameter(torch.ones(1))
            if share:
                self.first.weight = self.blocks[2].weight

    def units(share: bool) -> tuple[str, ...]:
        return Workload(Model(share), torch.ones, lambda output, _: output).units

    assert units(share=False) == ("first", "blocks.0", "blocks.2")
    assert units(share=True) == ()
    assert not dist.is_initialized()
