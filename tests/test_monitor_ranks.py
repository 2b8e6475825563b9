"""The record of DDP ranks equals that of one process, and no rank hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from small_runs import batch, quiet, small_model
from torch.nn.parallel import DistributedDataParallel

import distmon
from csrc_triton.row_layout import BIN_WIDTH, SMALLEST_EXPONENT
from distmon.errors import PlanMismatchError
from distmon.metrics import GRAD_PERCENTILES
from distmon.record.standard_error import DEGREES, student_factor
from distmon.sampling.sample import choose

STEPS = 6
GLOBAL_BATCH = 16


def _train(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A few steps in float64 on this rank's part of the global batch.

    In float64 the order in which gradients are added does not show, so ranks can be compared with
    one process to the rounding of the statistics themselves.
    """
    model = small_model(width=200).double()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    found: dict[str, Any] = {"records": [], "truth": []}
    collectives = _count_collectives()
    with distmon.attach(wrapped, optimizer, **quiet(Path(folder), interval=2)) as monitor:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            part = GLOBAL_BATCH // world
            mine = batch(step, GLOBAL_BATCH)[rank * part : (rank + 1) * part].double()
            loss = wrapped(mine).square().mean()
            loss.backward()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            counted = len(collectives)
            monitor.step(loss=loss, tokens=part)
            if step % 2 == 0:
                record = monitor.last_record
                assert record is not None
                assert dist.is_initialized() is False or len(collectives) - counted == 2
                found["records"].append(
                    {
                        **record.params.columns,
                        **record.params.percentiles,
                        "loss": record.losses,
                        "metrics": dict(record.metrics),
                    }
                )
                found["truth"].append(_truth(model, before))
            elif step > 1:  # the very first step agrees on where the run starts
                assert len(collectives) == counted
    return found


def _count_collectives() -> list[str]:
    calls: list[str] = []
    inner = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append("all_reduce")
        return inner(*args, **kwargs)

    dist.all_reduce = counting
    return calls


def _truth(model: torch.nn.Module, before: list[torch.Tensor]) -> list[dict[str, np.ndarray]]:
    """Sampled weights, gradients and updates of every parameter, in float64."""
    result = []
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        at = choose(name, parameter.numel(), 1024, 0).indices
        weight, grad, past = (
            t.detach().double().reshape(-1).numpy()[at]
            for t in (parameter, parameter.grad, old)
            if t is not None
        )
        whole = parameter.grad.double().norm().item()
        result.append({"weight": weight, "grad": grad, "update": weight - past, "norm": whole})
    return result


def _expected_norm(values: np.ndarray, numel: int) -> float:
    sample = choose("", numel, 1024, 0)
    return float(np.sqrt(sample.expansion * (values**2).sum()))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _train(0, 1, str(tmp_path_factory.mktemp("one")))


def test_records_hold_the_truth_of_the_sampled_elements(one_process: dict[str, Any]) -> None:
    sizes = [p.numel() for p in small_model(width=200).parameters()]
    assert max(sizes) > 1024 > min(sizes)
    for record, truth in zip(one_process["records"], one_process["truth"], strict=True):
        for i, values in enumerate(truth):
            for what in ("weight", "grad", "update"):
                # All gradients of so small a model are read.
                whole = what == "grad"
                expected = values["norm"] if whole else _expected_norm(values[what], sizes[i])
                # The second-order correction of a sampled norm is at most 1/8 of its variance.
                stderr = record[f"{what}_norm_stderr"][i] / student_factor(DEGREES) / expected
                corrected = expected * (1 + stderr**2 / 2)
                assert record[f"{what}_norm"][i] == pytest.approx(corrected, rel=1e-6)
            for quantile in GRAD_PERCENTILES:
                ordered = np.sort(values["grad"])
                rank = (len(ordered) - 1) * quantile / 100
                ends = ordered[[int(np.floor(rank)), int(np.ceil(rank))]]
                share = rank - np.floor(rank)
                bound = BIN_WIDTH * np.dot([1 - share, share], np.abs(ends))
                exact = np.percentile(values["grad"], quantile)
                error = abs(record[f"grad_p{quantile}"][i] - exact)
                assert error <= bound + 2.0**SMALLEST_EXPONENT


@pytest.mark.parametrize("world", [2])
def test_ranks_agree_with_one_process(
    world: int, one_process: dict[str, Any], tmp_path: Path
) -> None:
    results = run_ranks(_train, world, str(tmp_path))
    for found in results:
        for ours, alone in zip(found["records"], one_process["records"], strict=True):
            for name, column in alone.items():
                if isinstance(column, np.ndarray):
                    assert ours[name] == pytest.approx(column, rel=1e-6, nan_ok=True), name
            assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-9)
            for tag in ("monitor/grad_norm", "monitor/update_ratio_median", "train/step_loss_ema"):
                assert ours["metrics"][tag] == pytest.approx(alone["metrics"][tag], rel=1e-6)
    run = distmon.read_run(tmp_path / "run")
    assert [r["step"] for r in run.records] == [2, 4, 6]
    assert run.records[0]["world_size"] == world
    assert run.alerts == []


def _troubles(rank: int, _: int, folder: str) -> dict[str, Any]:
    """One spawn, several things that go wrong on one rank only."""
    found: dict[str, Any] = {}
    model = small_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(wrapped, optimizer, **quiet(Path(folder) / "a", interval=2)) as monitor:
        for step in range(1, 13):
            optimizer.zero_grad()
            loss = wrapped(batch(step)).square().mean()
            loss.backward()
            if step == 4 and rank == 1:  # the observation itself fails on one rank
                monitor.cycle.observer.rows.measure = _raise  # type: ignore[method-assign]
            if step == 5 and rank == 1:
                del monitor.cycle.observer.rows.measure
            optimizer.step()
            if step == 8 and rank == 2:
                model[2].weight.data.add_(1e-6)
            if step == 9 and rank == 2:
                found["checksum differs"] = True
            monitor.step(loss=loss)
            if step == 4:
                assert monitor.last_record is not None
                found["faults"] = monitor.last_record.faults
                found["ratio"] = float(monitor.last_record.params.columns["update_ratio"][0])
            if step == 10:
                assert monitor.last_record is not None
                found["desync"] = monitor.last_record.desync
    # NaN on one rank, between two observations.
    model = small_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(wrapped, optimizer, **quiet(Path(folder) / "b", interval=10)) as monitor:
        for step in range(1, 11):
            optimizer.zero_grad()
            loss = wrapped(batch(step)).square().mean()
            loss.backward()
            if step == 7 and rank == 1:
                model[2].bias.grad[3] = torch.nan
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            monitor.check(grad_norm=norm)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            optimizer.step()
            monitor.step(loss=loss)
        assert monitor.last_record is not None
        found["nonfinite"] = monitor.last_record.nonfinite
    # Ranks that would observe different things raise at attach.
    other = small_model(width=96 if rank else 97)
    optimizer = torch.optim.AdamW(other.parameters())
    try:
        distmon.attach(other, optimizer, **quiet(Path(folder) / "c"))
    except PlanMismatchError as error:
        found["mismatch"] = str(error)
    # So are versions and settings that differ, and a mistake on one rank only.
    real = distmon.__version__
    if rank == 1:
        distmon.__version__ = "0.0.1"
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        distmon.attach(model, optimizer, **quiet(Path(folder) / "c"))
    except PlanMismatchError as error:
        found["version"] = str(error)
    distmon.__version__ = real
    for name, settings in (
        ("interval", {"interval": 2 + rank}),
        ("percentiles", {"percentiles": rank != 1}),
        ("rules", {"rules": {"frozen": {"patience": 3 + (rank == 2)}}}),
        ("typo", {"intervall": 5} if rank == 1 else {}),
    ):
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            distmon.attach(model, optimizer, **{**quiet(Path(folder) / "c"), **settings})
        except distmon.DistmonError as error:
            found[name] = str(error)
    # State that was loaded on one rank only ends the monitoring, not the training.
    with distmon.attach(model, optimizer, **quiet(Path(folder) / "d")) as monitor:
        if rank == 2:
            state = monitor.state_dict()
            monitor.load_state_dict({**state, "schedule": {"step": 7}})
        deadline = time.monotonic() + 50
        while not monitor.closed and time.monotonic() < deadline:
            optimizer.step()  # no rank waits for the others to learn it
            monitor.step(loss=1.0)
            time.sleep(0.05)
        found["closed"] = monitor.closed
    # With `strict`, a run folder that only rank 0 can find unwritable stops all ranks.
    blocked = Path(folder) / f"file{rank}"
    blocked.write_text("x")
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        distmon.attach(model, optimizer, **quiet(blocked, strict=True))
    except distmon.DistmonError as error:
        found["folder"] = str(error)
    return found


def _raise(*_: Any) -> None:
    raise RuntimeError("the driver went away")


def test_what_goes_wrong_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    results = run_ranks(_troubles, 3, str(tmp_path))
    for rank, found in enumerate(results):
        (fault,) = found["faults"]
        assert fault.startswith(
            "rank 1 failed to observe step 4: measure: RuntimeError: the driver"
        )
        assert found["ratio"] > 0  # the other ranks' replicas still give the numbers
        desync = found["desync"]
        assert (desync.ranks, desync.reference, desync.tie) == ((2,), 0, False)
        assert desync.params[0] == "2.weight"
        nonfinite = found["nonfinite"]
        assert (nonfinite.step, nonfinite.param_count) == (7, 1)
        (place,) = nonfinite.places
        assert (place.param, place.rank, place.grad_nan) == ("2.bias", 1, 1)
        assert found["mismatch"].startswith(
            "0.weight is float32 (97, 32) on rank 0 and float32 (96, 32) on rank 1"
        )
        assert "has different settings" in found["interval"]
        assert found["version"].startswith("rank 1 has different versions")
        assert found["percentiles"].startswith("rank 1 has different settings")
        assert found["rules"].startswith("rank 2 has different settings")
        typo = 'unknown key "intervall"' if rank == 1 else "rank 1 failed to attach"
        assert typo in found["typo"]
        assert found["closed"]
        expected = "cannot write the run folder" if rank == 0 else "rank 0 failed to attach"
        assert expected in found["folder"]
    rules = [a["rule"] for a in distmon.read_run(tmp_path / "a" / "run").alerts]
    # All ranks train on the same batches here, which is named first.
    assert rules == ["ranks_share_data", "replica_desync"]


def _norms(rank: int, _: int, folder: str) -> Any:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(Path(folder), interval=2)) as monitor:
        for step in range(1, 5):
            if step < 3 or rank:
                monitor.check(grad_norm=float(10 * step + rank))
            optimizer.step()
            monitor.step()
            if step == 2:
                assert monitor.last_record is not None
                first = monitor.last_record.metrics["train/unclipped_grad_norm"]
        assert monitor.last_record is not None
        return first, monitor.last_record.metrics["train/unclipped_grad_norm"]


def test_a_shown_norm_is_the_same_on_every_rank(tmp_path: Path) -> None:
    # The newest of each rank; the largest of them, where ranks show different ones or none.
    assert run_ranks(_norms, 2, str(tmp_path)) == [(21.0, 41.0), (21.0, 41.0)]
