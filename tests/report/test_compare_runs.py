"""compare: noise is called noise, a change is found and named, other tools' logs are read."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from small_runs import TIMING_OFF, batch, small_model

import distmon
from benchmarks.report.synthetic_run import write_run
from distmon.cli.compare import CompareOptions, compare
from distmon.errors import ConfigError
from distmon.report.compare import compare_runs, load_runs, parse_condition
from distmon.report.compare.bootstrap import block_length, mean_interval
from distmon.report.compare.compared_run import ComparedRun
from distmon.report.compare.verdicts import compare_quantities


def _compare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "distmon.cli.main", "compare", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def _printed(*paths: Path, **options: Any) -> tuple[str, int]:
    """What the command prints, and its exit code."""
    text = StringIO()
    code = compare(Console(file=text, width=140), CompareOptions(paths, **options))
    return text.getvalue(), code


def test_a_resumed_run_is_the_same_training(tmp_path: Path) -> None:
    """Same weights, same batches: one without a break, one that was resumed in the middle."""
    for name, breaks in (("whole", [20]), ("resumed", [10, 20])):
        model = small_model(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        first, state = 1, None
        settings = {"run_dir": tmp_path / name, "sinks": ["jsonl", "arrow"], "interval": 2}
        for last in breaks:
            with distmon.attach(
                model, optimizer, rules=TIMING_OFF, budget=None, **settings
            ) as monitor:
                if state is not None:
                    monitor.load_state_dict(state)
                for step in range(first, last + 1):
                    loss = model(batch(step)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    monitor.step(loss=loss, tokens=16)
                state = monitor.state_dict()
            first = last + 1
    runs = load_runs([tmp_path / "whole", tmp_path / "resumed"])
    for run in runs:
        assert run.tokens == {step: 16.0 * step for step in range(2, 21, 2)}, "the first steps too"
    (comparison,) = compare_runs(runs)
    assert comparison.axis == "steps"
    assert not comparison.params, "a factor of 1 is no difference"
    assert not [each for each in comparison.differences if each.what == "tokens per step"]


def _train(path: Path, seed: int, lr: float, steps: int = 120) -> Path:
    """A model that fits a fixed teacher on noisy targets; the seed decides weights and batches."""
    model, teacher = small_model(seed), small_model(99)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {"run_dir": path, "sinks": ["jsonl", "arrow"], "interval": 5, "budget": None}
    with distmon.attach(model, optimizer, rules=TIMING_OFF, **settings) as monitor:
        for step in range(1, steps + 1):
            inputs = batch(step + 10_000 * seed)
            noise = torch.randn(16, 8, generator=torch.Generator().manual_seed(step + 7 * seed))
            loss = (model(inputs) - teacher(inputs).detach() - 0.3 * noise).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss, tokens=16)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {f"seed{seed}": _train(folder / f"seed{seed}", seed, 0.1) for seed in range(3)}
    found["low"] = _train(folder / "low", 0, 0.001)
    torch.set_num_threads(threads)
    return found


def _verdicts(*paths: Path) -> dict[str, str]:
    (comparison,) = compare_runs(load_runs(paths))
    return {each.quantity.key: each.verdict for each in comparison.quantities}


def test_seeds_of_one_setting_are_within_noise(runs: dict[str, Path]) -> None:
    for a, b in combinations(("seed0", "seed1", "seed2"), 2):
        assert _verdicts(runs[a], runs[b])["final_loss"] == "within noise"


def test_another_learning_rate_is_named_and_found_where_it_acts(runs: dict[str, Path]) -> None:
    result = _compare(runs["seed0"], runs["low"], "--json")
    assert result.returncode == 0, result.stderr
    (comparison,) = json.loads(result.stdout)["comparisons"]
    verdicts = {each["name"]: each["verdict"] for each in comparison["quantities"]}
    assert verdicts["final_loss"] == "worse"
    assert verdicts["update_ratio"] == "lower"
    differing = {each["what"]: (each["first"], each["other"]) for each in comparison["differences"]}
    assert differing == {
        "highest learning rate": ("0.1", "0.001"),
        "last learning rate": ("0.1", "0.001"),
    }
    assert comparison["params"][0]["metric"] == "update_ratio"
    assert comparison["params"][0]["factor"] < 0.1


def test_conditions_decide_the_exit_code(runs: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    text, code = _printed(runs["seed0"], runs["low"], fail_if=["final_loss > 1%"], html=page)
    assert code == 1
    assert "failed final_loss > 1%" in text
    assert "highest learning rate" in text
    assert "application/json" in page.read_text()
    for noise in ("final_loss > 0%", "final_loss < 0%"):
        assert _printed(runs["seed0"], runs["seed1"], fail_if=[noise])[1] == 0
    for wrong in ("final_los > 1%", "final_loss >", "final_loss > 1.2.3", "mfu > 1%"):
        with pytest.raises(ConfigError, match=wrong.split()[0]):
            _printed(runs["seed0"], runs["seed1"], fail_if=[wrong])


def test_logs_of_other_tools(runs: dict[str, Path], tmp_path: Path) -> None:
    losses = distmon.read_run(runs["seed0"]).losses
    table = tmp_path / "log.csv"
    table.write_text("step,train_loss\n" + "".join(f"{s},{v}\n" for s, v in losses.items()))
    worse = tmp_path / "history.jsonl"
    worse.write_text("".join(f'{{"_step": {s}, "loss": {v + 1}}}\n' for s, v in losses.items()))
    assert _verdicts(runs["seed0"], table) == {"final_loss": "equal"}
    assert _verdicts(table, worse) == {"final_loss": "worse"}


def test_at_equal_tokens_where_batches_differ(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", 5, 40, tokens=100)
    other = write_run(tmp_path / "b", 5, 40, tokens=200)
    (comparison,) = compare_runs(load_runs([first, other]))
    assert comparison.axis == "tokens"
    # The same losses at half as many steps: at equal tokens the second run is behind.
    verdicts = {each.quantity.key: each.verdict for each in comparison.quantities}
    assert verdicts["final_loss"] == "worse"
    (by_steps,) = compare_runs(load_runs([first, other]), "steps")
    assert by_steps.quantities[0].verdict == "equal"


def test_one_run_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two"):
        compare_runs(load_runs([write_run(tmp_path / "run", 3, 3)]))
    assert parse_condition("mfu < -0.5").relative is False


@pytest.mark.parametrize("memory", [0.0, 0.7])
def test_the_interval_covers(memory: float) -> None:
    """99% intervals of differences without a mean: at most a few in 200 miss zero."""
    noise = np.random.default_rng(1)
    misses = 0
    for trial in range(200):
        values = noise.normal(size=80)
        for at in range(1, 80):
            values[at] += memory * values[at - 1]
        low, high = mean_interval(values, seed=trial) or (0.0, 0.0)
        misses += not low <= 0 <= high
    assert misses <= 10
    assert block_length(np.cumsum(noise.normal(size=200))) > block_length(noise.normal(size=200))
    assert mean_interval(np.ones(3)) is None


def _timed(name: str, seconds: np.ndarray[Any, Any]) -> ComparedRun:
    steps = range(10, 10 * len(seconds) + 1, 10)
    found = {"performance/step_seconds": dict(zip(steps, seconds.tolist(), strict=True))}
    return ComparedRun(name, losses={}, val_losses={}, metrics=found, tokens={})


def test_a_loss_near_zero_differs_only_by_what_matters_next_to_its_fall() -> None:
    steps = range(1, 401)
    noise = np.random.default_rng(0).normal(0, 1e-6, (2, 400))

    def verdict(last: float) -> str:
        runs = []
        for end, each in ((1e-4, noise[0]), (last, noise[1])):
            losses = np.maximum(end, 4 * 0.9 ** np.arange(400)) + each
            series = dict(zip(steps, losses.tolist(), strict=True))
            runs.append(ComparedRun("run", losses=series, val_losses={}, metrics={}, tokens={}))
        (found,) = compare_quantities(*runs, "steps")
        return found.verdict

    assert verdict(2e-4) == "within noise", "twice of nearly nothing"
    assert verdict(1e-2) == "worse"


def test_speed_differs_only_beyond_what_a_run_changes_by_itself() -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, (2, 100))
    steady, slower = 1.0 + noise[0], 1.1 + noise[1]
    busy = steady.copy()
    busy[30:50] += 0.1  # another program ran then

    def verdict(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> str:
        (found,) = compare_quantities(_timed("a", a), _timed("b", b), "steps")
        return found.verdict

    assert verdict(steady, slower) == "worse"
    assert verdict(slower, steady) == "better"
    assert verdict(busy, slower) == "within noise"
    assert verdict(slower, busy) == "within noise"
    warm_up = steady.copy()
    warm_up[:10] += 3
    assert verdict(warm_up, slower) == "worse", "its beginning says nothing"
