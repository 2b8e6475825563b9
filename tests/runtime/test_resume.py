"""A run that is cut and goes on elsewhere: no jump, no lost patience, no doubled steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import run_ranks
from late_outbox import make_late
from small_runs import quiet, small_model, train
from torch.nn.parallel import DistributedDataParallel

import distmon
from distmon import Monitor
from distmon.runtime import observation_cycle

FROZEN = 3
CUT = 150


def _run(folder: Path, steps: range, state: dict[str, Any] | None, wrap: bool = False) -> Monitor:
    """Train `steps`; the parameter number FROZEN never gets a gradient."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    wrapped = DistributedDataParallel(model) if wrap else model
    settings = quiet(folder, interval=40, rules={"frozen": {"patience": 5}})
    monitor = distmon.attach(wrapped, optimizer, **settings)
    if state:
        monitor.load_state_dict(state["monitor"])

    def no_gradient(_: int) -> None:
        [*model.parameters()][FROZEN].grad = None

    train(wrapped, optimizer, monitor, steps, no_gradient, check=False)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved["monitor"] = monitor.state_dict()
    json.dumps(saved["monitor"])  # plain values only
    torch.save(saved, folder / "checkpoint.pt")
    # Steps after the checkpoint that the crash throws away.
    if steps.stop == CUT + 1:
        train(wrapped, optimizer, monitor, range(CUT + 1, CUT + 41), no_gradient, check=False)
    monitor.close()
    return monitor


def _on_rank(rank: int, world: int, folder: str) -> None:
    assert world == 2
    own = Path(folder) if rank == 0 else Path(folder) / "other"
    own.mkdir(exist_ok=True)
    # Only rank 0 writes; the other rank's checkpoint goes elsewhere.
    _run(own, range(1, CUT + 1), None, wrap=True)


def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    _run(whole, range(1, 241), None)
    cut = tmp_path / "cut"
    cut.mkdir()
    run_ranks(_on_rank, 2, str(cut))
    state = torch.load(cut / "checkpoint.pt", weights_only=False)
    assert state["monitor"]["schedule"]["step"] == CUT
    _run(cut, range(CUT + 1, 241), state)

    uncut, resumed = distmon.read_run(whole / "run"), distmon.read_run(cut / "run")
    assert [r["step"] for r in resumed.records] == [r["step"] for r in uncut.records]
    assert [a["resumed_from"] for a in resumed.info["attempts"]] == [0, CUT]
    assert [a["world_size"] for a in resumed.info["attempts"]] == [2, 1]
    # Both ranks saw the same data as the one process, so the averages are those of the uncut run.
    for tag in ("train/step_loss", "train/step_loss_ema", "monitor/update_ratio_median"):
        ours = [r["metrics"][tag] for r in resumed.records]
        assert ours == pytest.approx([r["metrics"][tag] for r in uncut.records], rel=1e-4)
    assert [*resumed.losses] == [*range(1, 241)]
    # Patience went on: 3 observations before the cut, 2 after.
    assert [(a["rule"], a["step"]) for a in resumed.alerts] == [
        ("ranks_share_data", 80),
        ("frozen", 200),
    ]
    # The re-run step 160 counts once, and is that of the later attempt.
    rows = resumed.params.to_pandas()
    assert sorted(rows["step"].unique()) == [40, 80, 120, 160, 200, 240]
    assert set(rows[rows["step"] == 160]["attempt"]) == {1}
    everything = distmon.read_run(cut / "run", all_attempts=True)
    assert [r["step"] for r in everything.records].count(160) == 2
    # The same elements are sampled: equal weights give equal estimates.
    first = uncut.params.to_pandas()
    both = first[first["step"] == 160].merge(rows[rows["step"] == 160], on="name")
    assert np.allclose(both["weight_norm_x"], both["weight_norm_y"], rtol=1e-5)


def test_a_shorter_interval_after_resume_keeps_the_average(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=100)) as monitor:
        train(model, optimizer, monitor, range(1, 91))
        state = monitor.state_dict()
    assert [step for step, _ in state["cycle"]["losses"]] == [*range(1, 91)]
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=20)) as monitor:
        monitor.load_state_dict(state)
        train(model, optimizer, monitor, range(91, 101))
        record = monitor.last_record
    assert record is not None
    assert [*record.losses] == [*range(81, 101)]
    ema = state["cycle"]["losses"][0][1]
    before = [loss for _, loss in state["cycle"]["losses"][1:]]
    for loss in [*before, *(record.losses[s] for s in range(91, 101))]:
        ema = 0.99 * ema + 0.01 * loss
    assert record.metrics["train/step_loss_ema"] == pytest.approx(ema, rel=1e-12)


def test_a_checkpoint_waits_for_the_device(tmp_path: Path, caplog: Any) -> None:
    """Otherwise the states of ranks would differ by how far their devices have come."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=10)) as monitor:
        make_late(monitor)
        train(model, optimizer, monitor, range(1, 21))
        assert len(monitor.cycle.observer.outbox) == 1
        state = monitor.state_dict()
    assert state["cycle"]["losses"] == []
    assert "has not finished" not in caplog.text


def test_a_checkpoint_while_a_record_is_in_flight_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another rank is so late that its observation does not arrive in time."""
    monkeypatch.setattr(observation_cycle, "PATIENCE_S", 0.0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=10)) as monitor:
        outbox = make_late(monitor)
        train(model, optimizer, monitor, range(1, 21))
        outbox.delay = 10**9
        state = monitor.state_dict()
        outbox.release()
    assert [step for step, _ in state["cycle"]["losses"]] == [*range(11, 21)]
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=10)) as resumed:
        resumed.load_state_dict(state)
        # The losses in flight count in the average, as they do in the record that arrived later.
        kept, arrived = (m.cycle.worker.state_dict()["record"] for m in (resumed, monitor))
        assert kept == arrived
