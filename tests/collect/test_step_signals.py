"""Signals of observed steps, on small models trained for real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import distmon
from distmon import Record
from distmon.collect.signals.backward_passes import BackwardPasses
from tests.small_runs import quiet

Spoil = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4)
    )


def _inputs(step: int) -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(step % 1000))


def observe(
    tmp_path: Path,
    steps: int = 8,
    *,
    zero: bool = True,
    passes: int = 1,
    same_batch: bool = False,
    before: Callable[[int, nn.Module], None] = lambda *_: None,
    skipped: Sequence[int] = (),
    **overrides: object,
) -> list[Record]:
    """Train with an observation every two steps, without some of them; return the records."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    records: list[Record] = []
    settings = quiet(tmp_path, interval=2, **overrides)
    with distmon.attach(model, optimizer, settings) as monitor:
        for step in range(1, steps + 1):
            before(step, model)
            if zero:
                optimizer.zero_grad()
            loss = model(_inputs(0 if same_batch else step)).square().mean()
            for _ in range(passes):
                loss.backward(retain_graph=True)
            if step not in skipped:
                optimizer.step()
            monitor.step(loss=loss)
            last = monitor.last_record
            if last is not None and (not records or records[-1] is not last):
                records.append(last)
    return records


def _values(records: list[Record], name: str) -> list[float]:
    return [float(record.ranks[name][0]) for record in records if name in record.ranks]


def test_a_plain_loop_has_one_pass_each_way_and_nothing_left_over(tmp_path: Path) -> None:
    records = observe(tmp_path)
    assert _values(records, "forward_passes") == [1.0] * 4
    assert _values(records, "backward_passes") == [1.0] * 4
    assert _values(records, "stale_grad_norm") == [0.0] * 4
    assert _values(records, "repeated_backward") == [0.0] * 4
    assert all(value > 0 for value in _values(records, "local_grad_norm"))
    assert _values(records, "eval_layers") == [0.0] * 4
    assert _values(records, "mode_layers") == [2.0] * 4
    assert _values(records, "batchnorm_layers") == [1.0] * 4


def test_gradients_that_are_not_cleared_are_seen_before_backward(tmp_path: Path) -> None:
    stale = _values(observe(tmp_path, zero=False), "stale_grad_norm")
    assert all(value > 0 for value in stale)
    assert stale[-1] > stale[0]


def test_the_same_loss_twice_is_a_repeated_backward(tmp_path: Path) -> None:
    records = observe(tmp_path, passes=2)
    assert _values(records, "backward_passes") == [2.0] * 4
    assert _values(records, "repeated_backward") == [1.0] * 4


def test_the_hash_of_a_batch_tells_batches_apart(tmp_path: Path) -> None:
    different = _values(observe(tmp_path / "a"), "batch_hash")
    assert len(set(different)) == len(different) == 4
    same = _values(observe(tmp_path / "b", same_batch=True), "batch_hash")
    assert len(set(same)) == 1
    assert _values(observe(tmp_path / "c", batch_hash=False), "batch_hash") == []


def test_layers_in_eval_mode_are_counted_and_named(tmp_path: Path) -> None:
    def before(step: int, model: nn.Module) -> None:
        if step > 4:
            model.eval()

    records = observe(tmp_path, before=before)
    assert _values(records, "eval_layers") == [0.0, 0.0, 2.0, 2.0]
    row = int(_values(records, "eval_layer_row")[-1])
    assert records[-1].params.names[row] == "1.weight"


def test_a_reset_matrix_is_far_from_where_its_updates_lead(tmp_path: Path) -> None:
    def before(step: int, model: nn.Module) -> None:
        if step == 5:
            nn.init.normal_(model[4].weight)  # type: ignore[index]

    records = observe(tmp_path, before=before)
    jumps = _values(records, "weight_jump")
    expected = _values(records, "weight_jump_expected")
    assert jumps[0] < 0.1  # the first observation has nothing to compare with
    assert jumps[1] > 0.5
    assert jumps[1] > 10 * expected[1]
    assert records[2].params.names[int(_values(records, "weight_jump_row")[1])] == "4.weight"


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_skipped_steps_replace_no_weights(tmp_path: Path, backend: str) -> None:
    # Without a step of the optimizer no sample is kept: what is compared is that of earlier.
    records = observe(tmp_path, steps=12, skipped=(*range(1, 6), 8), backend=backend)
    jumps = np.array(_values(records, "weight_jump"))
    assert np.isfinite(jumps).any()
    assert not (jumps > 2 * np.array(_values(records, "weight_jump_expected")) + 0.05).any()


def test_a_gradient_that_is_added_to_nothing_is_no_backward_pass(tmp_path: Path) -> None:
    """As of a gradient penalty: cleared between `autograd.grad` and `backward`."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with distmon.attach(model, optimizer, quiet(tmp_path, interval=2)) as monitor:
        for step in range(1, 9):
            loss = model(_inputs(step)).square().mean()
            slopes = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
            optimizer.zero_grad()
            (loss + 0.1 * sum(slope.square().sum() for slope in slopes)).backward()
            optimizer.step()
            monitor.step(loss=loss)
        record = monitor.last_record
    assert record is not None
    assert record.ranks["backward_passes"] == [1]
    assert record.ranks["stale_grad_norm"] == [0]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_cleared_before_their_own_pass_are_not_stale(
    tmp_path: Path, to_none: bool
) -> None:
    """As of a discriminator, which the generator's loss has reached before."""
    critic, maker = nn.Linear(8, 1), nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(each.parameters(), 1e-2) for each in (critic, maker)]
    with distmon.attach(critic, optimizers[0], quiet(tmp_path, interval=2)) as monitor:
        for step in range(1, 9):
            critic(maker(_inputs(step))).mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            optimizers[0].zero_grad(set_to_none=to_none)
            critic(_inputs(-step)).mean().backward()
            optimizers[0].step()
            monitor.step()
        record = monitor.last_record
    assert record is not None
    assert record.ranks["stale_grad_norm"] == [0]


def test_nothing_is_hooked_between_observations(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with distmon.attach(model, optimizer, quiet(tmp_path, interval=4)) as monitor:
        hooked = []
        for step in range(1, 9):
            hooked.append(any(p._backward_hooks for p in model.parameters()))
            optimizer.zero_grad()
            loss = model(_inputs(step)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    assert hooked == [False, False, False, True, False, False, False, True]
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_fault_in_a_hook_never_reaches_the_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(BackwardPasses, "_see", broken)
    records = observe(tmp_path)
    assert len(records) == 4
    assert "backward_passes" not in records[-1].ranks


def test_loss_and_reported_norm_of_a_rank(tmp_path: Path) -> None:
    records = observe(tmp_path)
    losses = [np.mean([*record.losses.values()]) for record in records]
    assert _values(records, "loss") == pytest.approx(losses)
    assert "reported_grad_norm" not in records[0].ranks


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("called", [True, False])
def test_optimizers_that_take_turns_are_found(tmp_path: Path, in_turn: bool, called: bool) -> None:
    """`called`: the models that are monitored are those that are called."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (first, second)]
    models = [first, second] if called else nn.ModuleDict({"first": first, "second": second})
    with distmon.attach(models, optimizers, quiet(tmp_path, interval=2)) as monitor:
        for step in range(1, 5):
            for optimizer in optimizers:
                if in_turn or optimizer is optimizers[0]:
                    optimizers[0].zero_grad()
                    optimizers[1].zero_grad()
                    loss = second(first(_inputs(step))).square().mean()
                    loss.backward()
                optimizer.step()
            monitor.step(loss=loss)
            record = monitor.last_record
    assert record is not None
    assert record.ranks["alternating"].tolist() == [float(in_turn)]
