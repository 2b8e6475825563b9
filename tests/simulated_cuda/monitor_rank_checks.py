"""The monitor on two ranks with a simulated device each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_runs import batch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distmon
from simulated_cuda.device import set_order, take_waits
from simulated_cuda.observed_training import adamw, comparable, made_model, settings

Wrap = Callable[[nn.Module], nn.Module]


def here(kind: str = "cuda") -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", dist.get_rank())


def shared_folder() -> Path:
    """Return the same new folder on both ranks."""
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names, src=0, device=torch.device("cpu"))
    return Path(names[0]) / "run"


def shard(model: nn.Module) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def observe(
    kind: str,
    wrap: Wrap,
    spoil: Callable[[int, nn.Module], None] = lambda *_: None,
    steps: int = 7,
    waits: list[list[str]] | None = None,
    **overrides: Any,
) -> Any:
    """Train on half of the batch per rank; return the run, as rank 0 wrote it."""
    model = wrap(made_model(here(kind)))
    optimizer = adamw(model)
    options = settings(run_dir=shared_folder(), **overrides)
    half = slice(dist.get_rank() * 8, dist.get_rank() * 8 + 8)
    with distmon.attach(model, optimizer, **options) as monitor:
        for step in range(1, steps + 1):
            loss = model(batch(step)[half].to(here(kind))).square().mean()
            loss.backward()
            spoil(step, model)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            take_waits()
            monitor.check(grad_norm=norm)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss.detach(), tokens=8)
            if waits is not None:
                waits.append(take_waits())
                torch.accelerator.synchronize()
    dist.barrier()
    return distmon.read_run(options["run_dir"])


def close(found: Any, expected: Any) -> None:
    """Compare records whose sums may be added in another order."""
    assert len(found) == len(expected)
    for (step, mine, *located), (other_step, theirs, *other_located) in zip(
        found, expected, strict=True
    ):
        assert step == other_step
        assert located == other_located
        assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
        for name, value in mine.items():
            limit = 1e-6 * max(1e-3, abs(theirs[name]))
            assert abs(value - theirs[name]) <= limit, (name, value, theirs[name])


def check_ddp_records_are_those_of_the_cpu() -> None:
    expected = comparable(observe("cpu", DistributedDataParallel))
    for seed in (0, 3):
        set_order(seed)
        close(comparable(observe("cuda", DistributedDataParallel)), expected)


def check_records_of_the_device_transport() -> None:
    """Reduced by the communicator of the device, in the order of the streams."""
    expected = comparable(observe("cpu", DistributedDataParallel))
    set_order(1)
    waits: list[list[str]] = []
    run = observe("cuda", DistributedDataParallel, waits=waits, transport="device")
    close(comparable(run), expected)
    assert not any(waits[1:]), waits


def check_fsdp2_records_are_those_of_the_cpu() -> None:
    expected = comparable(observe("cpu", DistributedDataParallel))
    for seed in (0, 2):
        set_order(seed)
        close(comparable(observe("cuda", shard)), expected)


def check_no_step_waits_with_sharded_norms() -> None:
    """`get_total_norm` of FSDP2 returns a DTensor that is not reduced yet."""
    for wrap in (DistributedDataParallel, shard):
        waits: list[list[str]] = []
        observe("cuda", wrap, waits=waits)
        assert not any(waits[1:]), waits


def check_a_nan_on_one_rank_is_located() -> None:
    def spoil(step: int, model: nn.Module) -> None:
        if step == 4 and dist.get_rank() == 1:
            model.module[1].inner.weight.grad[0, :2] = torch.nan

    run = observe("cuda", DistributedDataParallel, spoil=spoil, steps=9)
    found = next(r["nonfinite"] for r in run.records if r.get("nonfinite"))
    assert found["step"] == 4, found
    assert found["signal"] == "gradient norm", found
    assert {place["rank"] for place in found["places"]} == {1}, found
    assert "1.inner.weight" in {place["param"] for place in found["places"]}, found
    assert found["counted_at"] > 4, found


def check_a_diverged_replica_is_named_by_the_step_that_showed_it() -> None:
    """Every step is observed, so the checksums of the next one exist when this one is searched."""

    def spoil(step: int, model: nn.Module) -> None:
        if step == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                model.module[0].inner.weight.add_(0.5)
        if step == 4 and dist.get_rank() == 1:
            with torch.no_grad():
                model.module[0].inner.weight.sub_(0.5)
                model.module[2].bias.add_(0.5)

    run = observe("cuda", DistributedDataParallel, spoil=spoil, interval=1, steps=4)
    found = {r["step"]: r["desync"] for r in run.records if r.get("desync")}
    assert found[3]["params"] == ["0.inner.weight"], found


def check_a_loss_that_is_a_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cuda", (2,))
    model = shard(made_model(here()))
    optimizer, options = adamw(model), settings(run_dir=shared_folder())
    with distmon.attach(model, optimizer, **options) as monitor:
        for step in range(1, 7):
            model(batch(step).to(here())).square().mean().backward()
            optimizer.step()
            loss = distribute_tensor(torch.full((), 2.0 * step, device=here()), mesh, [Replicate()])
            take_waits()
            monitor.step(loss=loss, tokens=loss, lr=loss)
            assert step == 1 or not take_waits()
            torch.accelerator.synchronize()
    dist.barrier()
    losses = distmon.read_run(options["run_dir"]).losses
    assert losses == {step: 2.0 * step for step in range(1, 7)}, losses
