"""A pipeline and a mixture of experts on a pair of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engine_cases import Seen, keep, prepare
from torch import nn

import distmon

LR = 1e-2
QUIET = {"interval": 1, "sinks": ["jsonl"]}
FLOW = {"flow": {"blocks": ["2", "3"]}}
"""A layer of each stage of the pipeline."""


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 80), nn.Linear(80, 16), nn.Linear(16, 4)]


def micro_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(2, 16, generator=generator), torch.randn(2, 4, generator=generator)


def pipeline_reference(folder: Path) -> Seen:
    whole = nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LR)
    data, seen = micro_batches(), Seen([], [], [])
    with distmon.attach(whole, optimizer, {**QUIET, **FLOW, "run_dir": str(folder)}) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            total = torch.zeros(())
            for _ in range(2):
                x, y = next(data)
                total = total + nn.functional.mse_loss(whole(x), y) / 2
            total.backward()
            optimizer.step()
            monitor.step(loss=total)
            keep(seen, monitor)
    return seen


def pipeline(folder: Path) -> tuple[Seen, list[float]]:
    """What the monitor saw of two stages, and the losses that the engine returned."""
    deepspeed = prepare()
    deepspeed.init_distributed()
    from deepspeed.pipe import PipelineModule

    net = PipelineModule(layers(), num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    monitor = distmon.attach(engine, config={**QUIET, **FLOW, "run_dir": str(folder / "pipeline")})
    data, seen, losses = micro_batches(), Seen([], [], []), []
    for _ in range(3):
        losses.append(float(engine.train_batch(data)))
        keep(seen, monitor)
    engine.destroy()
    return seen, losses


def experts(rank: int, folder: Path) -> dict[tuple[int, int], Seen]:
    """By stage and number of ranks that the experts are spread over."""
    deepspeed = prepare()
    deepspeed.init_distributed()
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    class Net(nn.Module):
        def __init__(self, over: int) -> None:
            super().__init__()
            expert = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            self.inp = nn.Linear(16, 16)
            self.moe = MoE(16, expert, num_experts=2, ep_size=over, k=1, min_capacity=4)
            self.out = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden, auxiliary, _ = self.moe(self.inp(x))
            return (self.out(hidden) - y).square().mean() + 0.01 * auxiliary

    found: dict[tuple[int, int], Seen] = {}
    for stage, over in ((0, 2), (2, 1), (2, 2)):
        torch.manual_seed(0)
        net = Net(over)
        groups: Any = {"params": list(net.parameters()), "name": "all"}
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(groups, lr=LR)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        place = folder / f"experts{stage}{over}"
        monitor = distmon.attach(engine, config={**QUIET, "run_dir": str(place)})
        seen = Seen([], [], [])
        for step in range(2):
            generator = torch.Generator().manual_seed(5 + step + 10 * rank)
            x = torch.randn(4, 16, generator=generator)
            y = torch.randn(4, 4, generator=generator)
            engine.backward(engine(x, y))
            engine.step()
            keep(seen, monitor)
        found[stage, over] = seen
        engine.destroy()
    return found
