"""Families, batches, and a small run of the command."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.batches import CONTEXT, IGNORED, interactions, masked_words, words
from benchmarks.accuracy.families import FAMILIES, Family
from benchmarks.accuracy.observing import Observers, Training
from benchmarks.accuracy.readings import TOTAL, read_csv


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_words_are_as_frequent_as_in_life() -> None:
    (ids,) = words(30000)(64 * 1000, generator())
    assert ids.shape == (1000, CONTEXT)
    shares = ids.flatten().bincount(minlength=30000).sort(descending=True).values / ids.numel()
    assert 0.02 < shares[0] < 0.2
    assert 0.2 < shares[:50].sum() < 0.7
    assert (shares > 0).sum() > 3000, "a long tail"


def test_rare_words_share_the_last_id() -> None:
    (ids,) = words(100)(64 * 100, generator())
    assert ids.max() == 99
    assert (ids == 99).float().mean() > 0.2


def test_masked_words_are_labels_and_nothing_else_is() -> None:
    (whole,) = words(1000)(256, generator())
    ids, labels = masked_words(1000)(256, generator())
    masked = labels != IGNORED
    assert (ids[masked] == 999).all()
    assert torch.equal(labels[masked], whole[masked])
    assert torch.equal(ids[~masked], whole[~masked])
    assert masked.any(dim=1).all()


def test_few_items_have_most_interactions() -> None:
    users, items, clicked = interactions(1000, 5000)(4096, generator())
    assert users.shape == items.shape == clicked.shape == (4096,)
    assert items.max() < 5000
    assert (items < 50).float().mean() > 0.4


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_in_both_dtypes(name: str) -> None:
    for dtype in ("fp32", "bf16"):
        training = Training(FAMILIES[name], dtype, seed=0)
        assert training.model.training
        assert math.isfinite(training.step(64))
        assert 3e5 < sum(p.numel() for p in training.model.parameters()) < 2e7


def test_training_repeats_itself_from_a_restored_state() -> None:
    losses = []
    for _ in range(2):
        training = Training(FAMILIES["resnet"], "fp32", seed=3)
        state = training.state()
        training.step(64)
        training.restore(state)
        losses.append([training.step(64) for _ in range(2)])
    assert losses[0] == losses[1]


class OneOfTwo(nn.Module):
    """A layer that is trained and one that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 64)


def test_a_parameter_without_a_gradient_has_no_truth_and_no_estimate() -> None:
    def build() -> tuple[nn.Module, object]:
        model = OneOfTwo()
        return model, lambda x: model.used(x).square().mean()

    family = Family("one of two", lambda _, g: (torch.randn(8, 64, generator=g),), build)
    observers = Observers(Training(family, "fp32", seed=0), ["exact"], 10, count())
    readings = {(r.parameter, r.quantity): r for r in observers.observe("start", 64, 1)}
    unused = readings["unused.weight", "grad_norm"]
    assert math.isnan(unused.truth)
    assert math.isnan(unused.estimate)
    used = readings["used.weight", "grad_norm"]
    assert used.estimate == pytest.approx(used.truth, rel=1e-6)


def test_the_command_writes_readings_tables_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--families resnet --modes 64,nonsense,exact --batches 64,128 --dtypes fp32"
    steps = "--observations 1 --training-steps 2 --interval 7"
    assert main([*options.split(), *steps.split(), "--out", str(tmp_path)]) == 0
    assert "mode nonsense: not supported by this version" in capsys.readouterr().out
    readings = list(read_csv(tmp_path / "readings.csv"))
    totals = [r for r in readings if r.parameter == TOTAL]
    assert {(r.mode, r.stage, r.batch) for r in totals} == {
        (mode, stage, batch)
        for mode in ("64", "exact")
        for stage in ("start", "trained")
        for batch in (64, 128)
    }
    for reading in totals:
        tolerance = 1e-6 if reading.mode == "exact" else 0.5
        assert reading.estimate == pytest.approx(reading.truth, rel=tolerance)
    assert any(r.estimate != r.truth for r in totals if r.mode == "64")
    assert "MISSED" in (tmp_path / "accuracy.md").read_text()
    assert (tmp_path / "accuracy.png").stat().st_size > 1000
    (tmp_path / "accuracy.md").unlink()
    assert main(["--report", str(tmp_path)]) == 0
    assert "MISSED" in (tmp_path / "accuracy.md").read_text()


def test_an_unknown_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--families", "gpt9"])
    assert "gpt9 is not one of gpt2, llama" in capsys.readouterr().err


def test_nothing_is_trained_when_no_mode_is_supported(tmp_path: Path) -> None:
    assert main(["--modes", "nonsense", "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()
