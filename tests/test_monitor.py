"""The monitor in one process: what it measures, and what it must not do."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import batch, observe, quiet, small_model, train
from torch import nn

import distmon
from distmon.errors import ConfigError, LayoutError, RunFolderError


def _alerts(folder: Path) -> list[tuple[str, int]]:
    return [(a["rule"], a["step"]) for a in distmon.read_run(folder / "run").alerts]


def test_update_is_the_measured_difference_of_one_step(tmp_path: Path) -> None:
    """Two param groups, weight decay, clipping and momentum included; never lr * grad."""
    model = small_model()
    first, last = [*model.parameters()][:2], [*model.parameters()][2:]
    optimizer = torch.optim.AdamW(
        [{"params": first, "lr": 3e-3, "weight_decay": 0.3}, {"params": last, "lr": 1e-4}]
    )
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(step: int) -> None:
        seen[step] = [p.detach().clone() for p in model.parameters()]

    with distmon.attach(model, optimizer, **quiet(tmp_path, sample_size=10**6)) as monitor:
        records = train(model, optimizer, monitor, range(1, 6), keep)
        keep(6)
    for record in records:
        before, after = seen[record.step], seen[record.step + 1]
        for i in range(len(before)):
            delta = (after[i].double() - before[i].double()).norm().item()
            weight = after[i].double().norm().item()
            table = record.params.columns
            assert table["update_norm"][i] == pytest.approx(delta, rel=1e-6)
            assert table["update_ratio"][i] == pytest.approx(delta / weight, rel=1e-6)
        assert record.params.columns["lr"].tolist() == [3e-3] * 2 + [1e-4] * 4


def test_interval_does_not_change_what_a_step_measures(tmp_path: Path) -> None:
    every = observe(tmp_path / "a", steps=100, interval=1)
    rare = observe(tmp_path / "b", steps=100, interval=100)
    assert [r.step for r in rare] == [100]
    for name in ("update_ratio", "update_norm", "grad_norm", "weight_norm"):
        assert np.array_equal(every[99].params.columns[name], rare[0].params.columns[name])
    assert every[99].metrics["train/step_loss_ema"] == rare[0].metrics["train/step_loss_ema"]
    assert rare[0].losses == {s: every[s - 1].losses[s] for s in range(1, 101)}


def test_learning_rate_zero_freezes_nothing(tmp_path: Path) -> None:
    observe(tmp_path, steps=6, make=lambda p: torch.optim.AdamW(p, lr=0.0))
    assert _alerts(tmp_path) == []


def test_a_clean_run_raises_no_alert(tmp_path: Path) -> None:
    observe(tmp_path, steps=150)
    assert _alerts(tmp_path) == []


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
    assert _alerts(tmp_path) == []
    # Unscaled: the same gradient norms as a run without a scaler.
    plain = observe(tmp_path / "plain", steps=2)
    assert records[1] is not None
    assert records[1].metrics["monitor/grad_norm"] == pytest.approx(
        plain[1].metrics["monitor/grad_norm"], rel=0.2
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
        assert _alerts(folder) == []


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
    """No gradient, no owner, switched off, and put back by somebody: each is told apart."""
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(5)])
    optimizer = torch.optim.AdamW([m.weight for m in model[:4]], lr=1e-3)
    kept = model[3].weight.detach().clone()

    def put_back(*_: object) -> None:
        model[3].weight.data.copy_(kept)

    optimizer.register_step_post_hook(put_back)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        model[0].weight.requires_grad_(False)
        for step in range(1, 5):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            model[1].weight.grad = None
            optimizer.step()
            monitor.step(loss=loss)
    told = {a["params"][0]: a["message"] for a in distmon.read_run(tmp_path / "run").alerts}
    assert "requires_grad was switched off" in told["0.weight"]
    assert "it gets no gradient" in told["1.weight"]
    assert "2.weight" not in told
    assert "the optimizer does not change it" in told["3.weight"]
    assert "no optimizer owns it" in told["4.weight"]


def test_parameters_frozen_on_purpose_are_not_reported(tmp_path: Path) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    records = observe(
        tmp_path,
        model=model,
        make=lambda p: torch.optim.AdamW([x for x in p if x.requires_grad], lr=1e-3),
    )
    assert records[-1].metrics["monitor/frozen_count"] == 0
    assert _alerts(tmp_path) == []


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
    assert _alerts(tmp_path) == [("nonfinite", 4), ("nonfinite", 10)]


def test_each_optimizer_is_measured_over_its_own_first_step(tmp_path: Path) -> None:
    """A critic that steps five times before the generator does, as GANs train."""
    critic, generator = nn.Linear(32, 32), nn.Linear(32, 32)
    model = nn.ModuleDict({"critic": critic, "generator": generator})
    one = torch.optim.SGD(critic.parameters(), lr=1e-2)
    two = torch.optim.AdamW(generator.parameters(), lr=1e-3)
    with distmon.attach(model, [one, two], **quiet(tmp_path, sample_size=10**6)) as monitor:
        for step in range(1, 5):
            expected: dict[str, torch.Tensor] = {}
            for turn in range(5):
                one.zero_grad()
                critic(batch(10 * step + turn)).square().mean().backward()
                before = critic.weight.detach().clone()
                applied = critic.weight.grad.clone()
                one.step()
                if turn == 0:
                    expected = {"update": critic.weight.detach() - before, "grad": applied}
            two.zero_grad()
            critic(generator(batch(step))).square().mean().backward()
            if step != 3:
                two.step()
            monitor.step(loss=1.0)
            record = monitor.last_record
            assert record is not None
            columns = record.params.columns
            measured = ~np.isnan(columns["update_ratio"])
            assert measured.tolist() == [True, True] + [step != 3] * 2
            for what, tensor in expected.items():
                norm = tensor.double().norm().item()
                assert columns[f"{what}_norm"][0] == pytest.approx(norm, rel=1e-6)
            assert (columns["update_norm"][measured] > 0).all()
    assert _alerts(tmp_path) == []


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
    assert _alerts(tmp_path) == []


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
        assert _alerts(folder) == []


def test_a_nan_that_comes_back_is_told_again(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rules = {"frozen": {"enabled": False}}
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=5, rules=rules)) as monitor:
        for step in range(1, 41):
            optimizer.step()
            bad = step == 3 or step >= 35
            monitor.step(loss=torch.nan if bad else 1.0)
    assert _alerts(tmp_path) == [("nonfinite", 3), ("nonfinite", 5), ("nonfinite", 35)]


def test_a_run_that_skips_every_step_is_told(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=5)) as monitor:
        for _ in range(20):
            monitor.check(grad_norm=torch.nan)
            monitor.step(loss=1.0)
    assert _alerts(tmp_path) == [("steps_skipped", 20)]


def test_odd_arguments_do_not_reach_training(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=2)) as monitor:
        for _ in range(6):
            optimizer.step()
            monitor.step(loss="high", tokens=torch.ones(2, 2), lr=[1e-3])  # type: ignore[arg-type]
    assert len(distmon.read_run(tmp_path / "run").records) == 3


def test_a_failing_rule_loses_neither_record_nor_other_alerts(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rules = {"frozen": {"enabled": False}}
    with distmon.attach(model, optimizer, **quiet(tmp_path, rules=rules)) as monitor:
        monitor._rules._states["loss_spike"].memory["window"] = "spoilt"
        for step in range(1, 5):
            optimizer.step()
            monitor.step(loss=torch.nan if step == 2 else 1.0)
    run = distmon.read_run(tmp_path / "run")
    assert [r["step"] for r in run.records] == [1, 2, 3, 4]
    assert all(r["faults"] == [] for r in run.records)
    assert _alerts(tmp_path) == [("nonfinite", 2)]


def test_steps_that_do_not_count_by_one(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=100)) as monitor:
        for step in range(10, 410, 10):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            monitor.step(loss=float(step), step=step)
    run = distmon.read_run(tmp_path / "run")
    assert [r["step"] for r in run.records] == [100, 200, 300, 400]
    assert all(r["applied"] for r in run.records)
    assert run.losses == {s: float(s) for s in range(10, 410, 10)}


def test_manual_calls_measure_the_same_as_hooks(tmp_path: Path) -> None:
    hooked = observe(tmp_path / "a")
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = quiet(tmp_path / "b")
    with distmon.attach(model, None, hooks=False, **settings) as monitor:
        for step in range(1, 7):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            monitor.before_step()
            optimizer.step()
            monitor.after_step()
            monitor.step(loss=loss)
    assert monitor.last_record is not None
    for name in ("update_norm", "grad_norm"):
        assert np.array_equal(
            monitor.last_record.params.columns[name], hooked[-1].params.columns[name]
        )


def test_exact_mode_reads_everything(tmp_path: Path) -> None:
    model = small_model()
    records = observe(tmp_path, model=model, sample_size="exact")
    true = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).norm().item()
    grads = [p.grad.double().reshape(-1) for p in model.parameters() if p.grad is not None]
    assert records[-1].metrics["monitor/param_norm"] == pytest.approx(true, rel=1e-9)
    assert records[-1].metrics["monitor/grad_norm"] == pytest.approx(
        torch.cat(grads).norm().item(), rel=1e-9
    )
    assert records[-1].metrics["monitor/param_norm_stderr"] == 0
    assert records[-1].params.columns["update_norm_stderr"].max() > 0  # updates stay sampled


def test_accumulation_and_compile(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend="eager")
    with distmon.attach(compiled, optimizer, **quiet(tmp_path, interval=2)) as monitor:
        for step in range(1, 5):
            optimizer.zero_grad()
            for part in range(3):
                loss = compiled(batch(10 * step + part)).square().mean() / 3
                loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    run = distmon.read_run(tmp_path / "run")
    assert [r["step"] for r in run.records] == [2, 4]
    assert set(run.params["name"].to_pylist()) == {n for n, _ in model.named_parameters()}


def test_a_fault_of_the_monitor_never_reaches_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        before = model[0].weight
        del model[0]._parameters["weight"]
        before.data = torch.empty(0)  # somebody frees the storage under the monitor
        with caplog.at_level(logging.WARNING, "distmon"):
            for _ in range(3):
                optimizer.step()
                monitor.step(loss=1.0)
        assert caplog.text.count("could not do its part") <= 2
    record = distmon.read_run(tmp_path / "run").records[-1]
    assert "rank 0 could not observe step 3" in record["faults"][0]
    assert [r["step"] for r in distmon.read_run(tmp_path / "run").records] == [1, 2, 3]


def test_a_disabled_monitor_does_nothing(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, enabled=False)) as monitor:
        assert train(model, optimizer, monitor, range(1, 4)) == []
        monitor.load_state_dict(monitor.state_dict())
    assert not (tmp_path / "run").exists()
    assert not optimizer._optimizer_step_pre_hooks


def test_close_removes_every_hook(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = distmon.attach(model, optimizer, **quiet(tmp_path))
    assert optimizer._optimizer_step_pre_hooks
    monitor.close()
    monitor.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    monitor.step(loss=1.0)


def test_the_trainers_own_step_number_is_followed(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=10)) as monitor:
        for step in range(1234, 1256):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            monitor.step(loss=1.0, step=step)
    run = distmon.read_run(tmp_path / "run")
    assert [r["step"] for r in run.records] == [1240, 1250]
    assert run.info["attempts"][0]["resumed_from"] == 1233
    assert all(r["applied"] for r in run.records)


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(LayoutError, match=r"none of the 2 tensors in SGD belongs to the observed"):
        distmon.attach(model, torch.optim.SGD(nn.Linear(2, 2).parameters()), run_dir=tmp_path)
    with pytest.raises(LayoutError, match="has no parameters"):
        distmon.attach(nn.ReLU(), optimizer, run_dir=tmp_path)
    with pytest.raises(ConfigError, match='did you mean "interval"'):
        distmon.attach(model, optimizer, intervall=3)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="file/run"):
        distmon.attach(model, optimizer, run_dir=tmp_path / "file" / "run")
    with pytest.raises(LayoutError, match=r"torch\.optim\.Optimizer, not a list"):
        distmon.attach(model, [[optimizer]], run_dir=tmp_path)  # type: ignore[list-item]


@pytest.mark.parametrize("interval", [1, 4])
def test_records_picked_up_later_are_the_same(tmp_path: Path, interval: int) -> None:
    """As on an accelerator: the record of a step is read two steps later, the last one at close."""
    at_once = observe(tmp_path / "a", steps=12, interval=interval)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = distmon.attach(model, optimizer, **quiet(tmp_path / "b", interval=interval))
    monitor._lag = min(2, interval)
    later = train(model, optimizer, monitor, range(1, 12))
    assert [r.step for r in later] == [r.step for r in at_once if r.step <= 11 - monitor._lag]
    train(model, optimizer, monitor, range(12, 13))
    monitor.close()
    runs = [distmon.read_run(tmp_path / part / "run") for part in "ab"]
    for one, other in zip(*(run.records for run in runs), strict=True):
        for tag in ("monitor/update_ratio_max", "train/step_loss_ema", "monitor/grad_norm"):
            assert one["metrics"][tag] == other["metrics"][tag]
    assert runs[0].losses == runs[1].losses
