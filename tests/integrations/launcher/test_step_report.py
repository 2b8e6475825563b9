"""What is taken for the loss, the norm and the end of a step, on real optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import batch, quiet, small_model
from torch import nn

import distmon
from distmon.integrations.auto.following import Following
from distmon.integrations.auto.step_report import AutoStep
from distmon.integrations.launcher.model_search import ModelSearch


class Seen:
    """A monitored model whose steps complete by themselves."""

    def __init__(self, folder: Path) -> None:
        self.model = small_model()
        halves = [*self.model.parameters()][:3], [*self.model.parameters()][3:]
        self.optimizers = [torch.optim.SGD(half, lr=0.01) for half in halves]
        self.monitor = distmon.attach(self.model, self.optimizers, **quiet(folder))
        Following(AutoStep(self.monitor, self.optimizers))

    def backward(self, factor: float = 1.0, scaler: Any = None) -> float:
        loss = self.model(batch(1)).square().mean() * factor
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss.item()

    def loss(self, step: int) -> float:
        record = self.monitor.last_record
        assert record is not None
        assert record.step == step
        return float(record.metrics["train/step_loss"])


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Seen]:
    seen = Seen(tmp_path)
    yield seen
    seen.monitor.close()


def test_a_step_is_complete_when_every_optimizer_has_stepped(seen: Seen) -> None:
    expected = seen.backward() + seen.backward(0.5)  # two micro-batches
    norm = torch.nn.utils.clip_grad_norm_(seen.model.parameters(), 0.01)
    seen.optimizers[0].step()
    assert seen.monitor.last_record is None
    seen.optimizers[1].step()
    assert seen.loss(1) == pytest.approx(expected, rel=1e-6)
    record = seen.monitor.last_record
    assert record is not None
    assert record.metrics["monitor/grad_norm"] == pytest.approx(float(norm), rel=1e-6)


def test_an_optimizer_that_steps_again_begins_a_new_step(seen: Seen) -> None:
    for optimizer in seen.optimizers:
        optimizer.step()
    first = seen.backward()
    seen.optimizers[0].step()
    second = seen.backward()
    seen.optimizers[0].step()  # the second optimizer has its turn later
    assert seen.loss(2) == pytest.approx(first, rel=1e-6)
    seen.optimizers[1].step()
    assert seen.loss(3) == pytest.approx(second, rel=1e-6)
    assert first != second


def test_the_norm_of_some_parameters_is_not_the_total_norm(seen: Seen) -> None:
    seen.backward()
    some = float(torch.nn.utils.clip_grad_norm_([*seen.model.parameters()][:2], 1e-3))
    for optimizer in seen.optimizers:
        optimizer.step()
    record = seen.monitor.last_record
    assert record is not None
    assert record.metrics["monitor/grad_norm"] != pytest.approx(some, rel=0.01)


def test_a_scaled_loss_is_reported_unscaled_and_a_skipped_step_counts(seen: Seen) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    expected = seen.backward(scaler=scaler)
    for optimizer in seen.optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert seen.loss(1) == pytest.approx(expected, rel=1e-6)
    seen.backward(scaler=scaler)
    for parameter in seen.model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(float("inf"))
    for optimizer in seen.optimizers:
        scaler.step(optimizer)
    scaler.update()
    record = seen.monitor.last_record
    assert record is not None
    assert (record.step, record.applied) == (2, False)


def test_closing_restores_what_was_replaced(tmp_path: Path) -> None:
    def replaced() -> list[Any]:
        scaler = torch.amp.GradScaler
        clip = torch.nn.utils.clip_grad._clip_grads_with_norm_
        return [torch.autograd.backward, clip, scaler.scale, scaler.step]

    before = replaced()
    seen = Seen(tmp_path)
    assert replaced() != before
    seen.monitor.close()
    assert replaced() == before
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in seen.optimizers)


def test_the_model_of_an_optimizer_is_found_also_when_it_is_never_called() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(2, 2), nn.Linear(2, 2)
            self.unused = nn.Linear(2, 2)

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.extra = inner, nn.Linear(1, 1)

    model = Two()
    outer = Wrapper(model)
    parts = [*model.encoder.parameters(), *model.decoder.parameters()]
    optimizer = torch.optim.SGD(parts, lr=0.1)
    search = ModelSearch()
    search.add(optimizer)
    assert not search.call(model.encoder)
    assert not search.call(model.unused)
    assert not search.call(model.decoder)
    assert search.has_called
    assert search.smallest_holder(optimizer) is model
    assert search.called_by_hand(optimizer) == [model.encoder, model.decoder]
    assert search.call(outer)
    assert search.trained_in(outer) == [optimizer]
    search.remove([optimizer])
    assert not search.optimizers
    assert not search.has_called
