"""TensorBoard folders, distmon's own and others."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

import distmon
from distmon.errors import ConfigError
from distmon.replay import LogError, find_sources, read_source, replay_run


def test_tags_of_distmon_give_the_same_losses(trained_run: Path) -> None:
    replay = replay_run(trained_run / "tb")
    assert replay.failures == ()
    run = distmon.read_run(trained_run)
    losses = {step: loss for record in replay.records for step, loss in record.losses.items()}
    assert losses == pytest.approx(run.losses, rel=1e-6)  # TensorBoard keeps float32
    ema = {step: v for record in replay.records for step, v in record.loss_ema.items()}
    assert ema == pytest.approx(run.loss_ema, rel=1e-6)
    assert [r.step for r in replay.records] == [*range(2, 41, 2)]
    spikes = [(a["step"], a["message"]) for a in run.alerts if a["rule"] == "loss_spike"]
    found = replay.by_rule()["loss_spike"]
    assert [(a.step, a.message) for a in found] == spikes
    evaluations = [e for record in replay.records for e in record.evaluations]
    recorded = [e for record in run.records for e in record["evaluations"]]
    assert [e.val_loss for e in evaluations] == pytest.approx([e["val_loss"] for e in recorded])
    assert [e.train_loss for e in evaluations] == pytest.approx([e["train_loss"] for e in recorded])


def test_foreign_tags_of_both_kinds(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        for step in range(0, 50, 10):
            loss = math.nan if step == 40 else 3.0
            writer.add_scalar("train/loss", loss, step, walltime=100.0 + step)
            # Keras and newer writers store scalars as tensors.
            writer.add_scalar("learning_rate", 0.1, step, new_style=True)
            writer.add_histogram("weights", np.ones(3), step)
            writer.add_scalar("custom/thing", 1.0, step)
    (source,) = find_sources(tmp_path)
    (recording,) = read_source(source)
    assert recording.kind == "TensorBoard"
    assert [r.step for r in recording.records] == [0, 10, 20, 30, 40]
    assert recording.records[1].losses == {10: 3.0}
    assert recording.records[1].metrics["train/lr"] == pytest.approx(0.1)
    assert recording.notes == ("columns that no rule uses: custom/thing",)
    (event_file,) = source.path.iterdir()
    assert ("nonfinite", 40) in [(a.rule, a.step) for a in replay_run(event_file).alerts]


def test_steps_that_were_run_again_count_once(tmp_path: Path) -> None:
    for begin, value in ((1, 4.0), (3, 2.0)):
        with SummaryWriter(str(tmp_path), purge_step=begin, filename_suffix=str(begin)) as writer:
            for step in range(begin, begin + 4):
                writer.add_scalar("loss", value, step)
    (recording,) = read_source(find_sources(tmp_path)[0])
    losses = {s: loss for r in recording.records for s, loss in r.losses.items()}
    assert losses == {1: 4.0, 2: 4.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 2.0}


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1").touch()
    name = "tensorboard.compat.proto.event_pb2"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'distmon\[tensorboard\]'"):
        replay_run(tmp_path)


def test_an_empty_or_broken_event_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "events.out.tfevents.1"
    for content in (b"", b"this is no event file at all, not even nearly"):
        file.write_bytes(content)
        with pytest.raises(LogError, match=r"holds no scalars|cannot read"):
            replay_run(tmp_path)
