"""The monitor in one process: what it measures, and what it must not do."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from late_outbox import make_late
from small_runs import alerts_in, batch, observe, quiet, small_model, train
from torch import nn

import distmon
from distmon.errors import ConfigError, LayoutError, RunFolderError


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
    assert alerts_in(tmp_path) == []


def test_odd_arguments_do_not_reach_training(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=2)) as monitor:
        for _ in range(6):
            optimizer.step()
            monitor.step(loss="high", tokens=torch.ones(2, 2), lr=[1e-3])  # type: ignore[arg-type]
    assert len(distmon.read_run(tmp_path / "run").records) == 3


def test_a_failing_rule_loses_neither_record_nor_otheralerts_in(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rules = {"frozen": {"enabled": False}}
    in_here = quiet(tmp_path, rules=rules, writer="thread")
    with distmon.attach(model, optimizer, **in_here) as monitor:
        monitor.cycle.worker.evaluator.rules.states["loss_spike"].memory["window"] = "spoilt"
        for step in range(1, 5):
            optimizer.step()
            monitor.step(loss=torch.nan if step == 2 else 1.0)
    run = distmon.read_run(tmp_path / "run")
    assert [r["step"] for r in run.records] == [1, 2, 3, 4]
    assert all(r["faults"] == [] for r in run.records)
    assert alerts_in(tmp_path) == [("nonfinite", 2)]


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
    assert records[-1].metrics["monitor/applied_grad_norm"] == pytest.approx(
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
        before.data = torch.empty(0)  # somebody frees the storage under the monitor
        with caplog.at_level(logging.WARNING, "distmon"):
            for _ in range(3):
                optimizer.step()
                monitor.step(loss=1.0)
        assert caplog.text.count("continuing without this observation") <= 2
    record = distmon.read_run(tmp_path / "run").records[-1]
    assert "rank 0 failed to observe step 3" in record["faults"][0]
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
    *observed, rest = run.records
    assert [r["step"] for r in observed] == [1240, 1250]
    assert run.info["attempts"][0]["resumed_from"] == 1233
    assert all(r["applied"] for r in observed)
    assert rest["partial"]
    assert rest["loss_steps"] == [1251, 1252, 1253, 1254, 1255]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("numbers", [[*range(23)], [1, 1, *range(2, 9), 8, *range(9, 23)]])
def test_the_numbers_of_a_trainer_are_not_shifted(
    tmp_path: Path, numbers: list[int], backend: str
) -> None:
    """From 0, or with a number twice; counted in compiled code (auto) and in Python."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = quiet(tmp_path, interval=10, backend=backend)
    with distmon.attach(model, optimizer, **settings) as monitor:
        for step in numbers:
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            monitor.step(loss=float(step), step=step)
        assert monitor.schedule.completed == 22
    run = distmon.read_run(tmp_path / "run")
    assert [r["step"] for r in run.records if not r["partial"]] == [10, 20]
    assert all(step == loss for step, loss in run.losses.items())


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
        distmon.attach(model, optimizer, run_dir=tmp_path / "file" / "run", strict=True)
    with pytest.raises(LayoutError, match=r"torch\.optim\.Optimizer, not a list"):
        distmon.attach(model, [[optimizer]], run_dir=tmp_path)  # type: ignore[list-item]


def test_a_record_stays_as_it_was(tmp_path: Path) -> None:
    """The buffers that it came from are filled anew at every observation."""
    records = observe(tmp_path, steps=4, interval=1)
    assert [int(record.ranks["step"][0]) for record in records] == [1, 2, 3, 4]
    assert len({float(record.ranks["time"][0]) for record in records}) == 4
    shorter = observe(tmp_path / "shorter", steps=2, interval=1)
    for before, after in zip(shorter, records, strict=False):
        for name, column in before.params.columns.items():
            assert np.array_equal(column, after.params.columns[name], equal_nan=True), name


@pytest.mark.parametrize("interval", [1, 4])
def test_records_that_arrive_later_are_the_same(tmp_path: Path, interval: int) -> None:
    """As on an accelerator, or over a slow network: at interval 1 several are in flight."""
    at_once = observe(tmp_path / "a", steps=12, interval=interval)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = distmon.attach(model, optimizer, **quiet(tmp_path / "b", interval=interval))
    outbox = make_late(monitor)
    later = train(model, optimizer, monitor, range(1, 13))
    assert len(later) < len(at_once)
    outbox.release()
    monitor.close()
    runs = [distmon.read_run(tmp_path / part / "run") for part in "ab"]
    for one, other in zip(*(run.records for run in runs), strict=True):
        for tag in ("monitor/update_ratio_max", "train/step_loss_ema", "monitor/grad_norm"):
            assert one["metrics"][tag] == other["metrics"][tag]
    assert runs[0].losses == runs[1].losses
