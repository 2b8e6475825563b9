"""Alerts of real small runs: faults by name and reason, and none when the run is healthy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import alerts_in, batch, observe, quiet, small_model
from torch import nn

import distmon


def test_learning_rate_zero_freezes_nothing(tmp_path: Path) -> None:
    observe(tmp_path, steps=6, make=lambda p: torch.optim.AdamW(p, lr=0.0))
    assert alerts_in(tmp_path) == [("lr_zero", 3)]


def test_a_clean_run_raises_no_alert(tmp_path: Path) -> None:
    observe(tmp_path, steps=150)
    assert alerts_in(tmp_path) == []


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_the_scaler_measures_nothing(tmp_path: Path, fused: bool) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    records = []
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        for step in range(1, 9):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            scaler.scale(loss).backward()
            if step in (3, 4, 5, 6):
                model[0].weight.grad[0, 0] = torch.inf
            monitor.check(grad_norm=model[0].weight.grad.norm())
            scaler.step(optimizer)
            scaler.update()
            monitor.step(loss=loss)
            records.append(monitor.last_record)
    applied = [r.applied for r in records if r]
    assert applied == [True, True, False, False, False, False, True, True]
    for record in records:
        assert record is not None
        ratio = record.params.columns["update_ratio"]
        assert np.isnan(ratio).all() if not record.applied else (ratio > 0).all()
        assert record.params.columns["weight_norm"].min() > 0
    assert alerts_in(tmp_path) == []
    # Unscaled: the same gradient norms as a run without a scaler.
    plain = observe(tmp_path / "plain", steps=2)
    assert records[1] is not None
    assert records[1].metrics["monitor/applied_grad_norm"] == pytest.approx(
        plain[1].metrics["monitor/applied_grad_norm"], rel=0.2
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_an_embedding_with_few_live_rows_is_not_frozen(tmp_path: Path, weight_decay: float) -> None:
    """1% of the rows ever get a gradient, so most samples see none of them move."""
    for seed in range(8):
        torch.manual_seed(seed)
        embedding = nn.Embedding(3000, 64)
        optimizer = torch.optim.AdamW(embedding.parameters(), lr=1e-2, weight_decay=weight_decay)
        live = torch.randperm(3000)[:30]
        folder = tmp_path / str(seed)
        with distmon.attach(embedding, optimizer, seed=seed, **quiet(folder)) as monitor:
            for _ in range(8):
                optimizer.zero_grad()
                loss = embedding(live).square().mean()
                loss.backward()
                optimizer.step()
                monitor.step(loss=loss)
        assert alerts_in(folder) == []


def test_an_embedding_without_any_gradient_is_frozen(tmp_path: Path) -> None:
    embedding = nn.Embedding(3000, 64)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1e-2)
    with distmon.attach(embedding, optimizer, **quiet(tmp_path)) as monitor:
        for _ in range(6):
            embedding.weight.grad = torch.zeros_like(embedding.weight)
            optimizer.step()
            monitor.step()
    (alert,) = distmon.read_run(tmp_path / "run").alerts
    assert "its gradient is exactly zero everywhere" in alert["message"]


def test_bf16_updates_lost_to_rounding_are_told(tmp_path: Path) -> None:
    model = small_model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, weight_decay=0.0)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        for step in range(1, 6):
            optimizer.zero_grad()
            loss = model(batch(step).bfloat16()).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        record = monitor.last_record
    assert record is not None
    assert record.metrics["monitor/update_lost_fraction"] > 0.95
    alerts = [a for a in distmon.read_run(tmp_path / "run").alerts if a["rule"] == "frozen"]
    assert alerts
    assert all("lost to rounding" in a["message"] for a in alerts)
    # What rounding can have taken is a bound on what AdamW wanted: about lr per element.
    wanted = 1e-7 * np.sqrt([p.numel() for p in model.parameters()])
    assert (record.params.columns["update_lost_bound"] > wanted).all()


def test_reasons_of_real_faults(tmp_path: Path) -> None:
    """No gradient, no owner, switched off, and restored by a copy: each has its own reason."""
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(5)])
    optimizer = torch.optim.AdamW([m.weight for m in model[:4]], lr=1e-3)
    kept = model[3].weight.detach().clone()

    def put_back(*_: object) -> None:
        model[3].weight.data.copy_(kept)

    optimizer.register_step_post_hook(put_back)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        for step in range(1, 7):
            model[0].weight.requires_grad_(step < 3)
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            model[1].weight.grad = None
            optimizer.step()
            monitor.step(loss=loss)
    alerts = distmon.read_run(tmp_path / "run").alerts
    messages = {a["params"][0]: a["message"] for a in alerts if a["rule"] == "frozen"}
    assert "requires_grad was set to False" in messages["0.weight"]
    assert "it gets no gradient" in messages["1.weight"]
    assert "2.weight" not in messages
    assert "the optimizer does not change it" in messages["3.weight"]
    assert "no optimizer owns it" in messages["4.weight"]


def test_parameters_frozen_on_purpose_are_not_reported(tmp_path: Path) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    records = observe(
        tmp_path,
        model=model,
        make=lambda p: torch.optim.AdamW([x for x in p if x.requires_grad], lr=1e-3),
    )
    assert records[-1].metrics["monitor/frozen_count"] == 0
    assert alerts_in(tmp_path) == []


def test_nan_is_named_where_it_began(tmp_path: Path) -> None:
    """Clipping spreads a NaN to every gradient within the step; the origin is kept all the same."""
    model = small_model()

    def spoil(step: int) -> None:
        if step == 7:
            model[2].weight.grad[5, 5] = torch.nan

    observe(tmp_path, steps=20, model=model, before_optimizer=spoil, interval=10)
    at_once, located = distmon.read_run(tmp_path / "run").alerts
    assert (at_once["step"], at_once["severity"]) == (7, "critical")
    assert "the gradient norm is nan at step 7 on rank 0" in at_once["message"]
    assert (located["step"], located["params"], located["ranks"]) == (10, ["2.weight"], [0])
    assert "step 7" in located["message"]
    assert "1 NaN in its gradient" in located["message"]


def test_nan_in_the_loss_alone_is_noticed_at_its_step(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=10)) as monitor:
        for step in range(1, 11):
            optimizer.step()
            monitor.step(loss=torch.tensor(torch.nan if step == 4 else 1.0))
    assert alerts_in(tmp_path) == [("nonfinite", 4), ("nonfinite", 10)]


def test_two_fused_optimizers_under_one_scaler(tmp_path: Path) -> None:
    model = small_model()
    parameters = [*model.parameters()]
    optimizers = [torch.optim.AdamW(p, fused=True) for p in (parameters[:2], parameters[2:])]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with distmon.attach(model, optimizers, **quiet(tmp_path)) as monitor:
        for step in range(1, 9):
            model.zero_grad()
            loss = model(batch(step)).square().mean()
            scaler.scale(loss).backward()
            if step > 3:
                parameters[0].grad[0, 0] = torch.inf
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            monitor.step(loss=loss)
            assert monitor.last_record is not None
            measured = ~np.isnan(monitor.last_record.params.columns["update_ratio"])
            assert measured.tolist() == [step <= 3] * 2 + [True] * 4
    assert alerts_in(tmp_path) == []


def test_an_alternating_frozen_parameter_is_found(tmp_path: Path) -> None:
    """Observations that do not measure a parameter neither confirm nor end its streak."""
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    optimizers = [torch.optim.SGD(model[k].parameters(), lr=1e-2) for k in "ab"]
    with distmon.attach(model, optimizers, **quiet(tmp_path)) as monitor:
        for step in range(12):
            model.zero_grad()
            model["a"](torch.randn(4, 8)).square().mean().backward()
            optimizers[step % 2].step()
            monitor.step(loss=1.0)
    (alert,) = distmon.read_run(tmp_path / "run").alerts
    assert alert["params"] == ["b.weight", "b.bias"]


def test_sparse_and_exactly_read_embeddings_are_not_called_frozen(tmp_path: Path) -> None:
    for name, settings in (("sparse", {}), ("exact", {"sample_size": "exact"})):
        torch.manual_seed(0)
        embedding = nn.Embedding(3000, 64, sparse=name == "sparse")
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        folder = tmp_path / name
        with distmon.attach(embedding, optimizer, **quiet(folder, **settings)) as monitor:
            for _ in range(8):
                optimizer.zero_grad()
                embedding(torch.tensor([5, 77])).square().mean().backward()
                optimizer.step()
                monitor.step(loss=1.0)
        assert alerts_in(folder) == []


def test_a_nan_that_comes_back_is_told_again(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rules = {"frozen": {"enabled": False}}
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=5, rules=rules)) as monitor:
        for step in range(1, 41):
            optimizer.step()
            bad = step == 3 or step >= 35
            monitor.step(loss=torch.nan if bad else 1.0)
    assert alerts_in(tmp_path) == [("nonfinite", 3), ("nonfinite", 5), ("nonfinite", 35)]


def test_a_run_that_skips_every_step_is_told(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=5)) as monitor:
        for _ in range(20):
            monitor.check(grad_norm=torch.nan)
            monitor.step(loss=1.0)
    assert alerts_in(tmp_path) == [("steps_skipped", 20)]
