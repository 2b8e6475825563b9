"""Slowdowns planted in the trainer are named; MFU and the monitor's own cost in real runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import Case, run_cases

import distmon
from distmon.collect.telemetry.mfu.formula import TransformerShape

PEAK = 1e13
MFU = ["--monitor.interval=4", "--batch-size=32", f"--monitor.mfu.peak-flops={PEAK}"]
TINY_SHAPE = TransformerShape(layers=2, width=32, heads=2, context=32, vocabulary=256)
BY_HAND = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 256}


def planted(kind: str, seconds: float, *arguments: str) -> list[str]:
    delay = [f"--inject={kind}", "--inject-at=5", f"--inject-seconds={seconds}"]
    return ["--steps=16", "--monitor.interval=4", *delay, *arguments]


CASES = {
    "straggler": planted("straggler", 0.1, "--inject-rank=0"),
    "slow_data": planted("slow_data", 0.1, "--inject-rank=1"),
    "slow_data_warning": planted(
        "slow_data", 0.1, "--monitor.rules.dataloader_bound.critical=0.99"
    ),
    "memory_leak": [
        *("--steps=45", "--monitor.interval=1"),
        *("--inject=memory_leak", "--inject-at=2", "--inject-rank=1"),
    ],
    "budget": [
        *("--steps=24", "--monitor.interval=2"),
        *("--monitor.budget=0.00001", "--monitor.budget-after-s=0.02"),
    ],
    **{
        f"counted-{parts}": [*MFU, "--monitor.mfu.count=true", f"--accumulate={parts}"]
        for parts in (1, 4, 16)
    },
    "formula": [
        *MFU,
        "--monitor.mfu.context=32",
        *(f"--monitor.mfu.model.{key}={value}" for key, value in BY_HAND.items()),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every run of this file happens."""
    return tmp_path_factory.mktemp("slowdowns")


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, Case]:
    """All runs, on the same two ranks."""
    common = ["--save-every=0", "--monitoring", "--monitor.sinks=jsonl"]
    asked = {
        name: [*common, f"--monitor.run-dir={name}", *arguments]
        for name, arguments in CASES.items()
    }
    return run_cases(folder, 2, asked)


def observations(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records without that of the last losses, which is made when the run ends."""
    return [r for r in distmon.read_run(folder / name).records if not r.get("partial")]


def alerts_of(folder: Path, name: str, rule: str) -> list[dict[str, Any]]:
    return [alert for alert in distmon.read_run(folder / name).alerts if alert["rule"] == rule]


def test_the_slow_rank_is_named_within_two_observations(
    folder: Path, cases: dict[str, Case]
) -> None:
    assert cases["straggler"].code == 0, cases["straggler"].err
    (alert,) = alerts_of(folder, "straggler", "straggler")
    assert (alert["step"], alert["ranks"]) == (12, [0])
    found = re.search(
        r"its forward phase takes (\S+) ms longer .* since step 8; 1 rank waits", alert["message"]
    )
    assert found is not None
    assert float(found[1]) > 50


def test_slow_data_is_named_with_its_rank_and_its_severity(
    folder: Path, cases: dict[str, Case]
) -> None:
    assert cases["slow_data"].code == 0, cases["slow_data"].err
    (alert,) = alerts_of(folder, "slow_data", "dataloader_bound")
    assert (alert["severity"], alert["ranks"]) == ("critical", [1])
    assert alert["step"] in (12, 16)  # on a busy machine the first steps wait for data, too
    assert alert["measured"] > alert["threshold"] == 0.2
    (slow,) = alerts_of(folder, "slow_data", "straggler")
    assert slow["ranks"] == [1]
    assert "its data phase" in slow["message"]
    (alert,) = alerts_of(folder, "slow_data_warning", "dataloader_bound")
    assert (alert["severity"], alert["threshold"]) == ("warning", 0.1)
    assert alerts_of(folder, "slow_data_warning", "straggler") == []  # all ranks wait alike


def test_leaking_memory_is_named_with_its_rank(folder: Path, cases: dict[str, Case]) -> None:
    assert cases["memory_leak"].code == 0, cases["memory_leak"].err
    (alert,) = alerts_of(folder, "memory_leak", "memory_creep")
    assert alert["ranks"] == [1]
    found = re.search(r"most on rank 1: by (\S+) MB per 1000 steps", alert["message"])
    assert found is not None
    assert float(found[1].replace(",", "")) == pytest.approx(8000, rel=0.2)


def flops_per_token(folder: Path, name: str) -> list[float]:
    """What the MFU of every record stands for, whatever time the steps took."""
    metrics = [record["metrics"] for record in observations(folder, name)]
    return [
        each["performance/mfu"] * 2 * PEAK / each["performance/tokens_per_second"]
        for each in metrics
    ]


@pytest.mark.parametrize("name", ["counted-1", "counted-4", "counted-16", "formula"])
def test_mfu_counts_the_same_work_however_it_is_cut(
    name: str, folder: Path, cases: dict[str, Case]
) -> None:
    assert cases[name].code == 0, cases[name].err
    sources = {r["mfu_source"] for r in observations(folder, name)}
    assert all("FLOPs per token" in source and "peak" in source for source in sources)
    found = flops_per_token(folder, name)
    assert found == pytest.approx([TINY_SHAPE.flops(causal=True).value] * len(found), rel=1e-12)
    assert len(found) == 1


def test_too_expensive_observations_become_rarer_with_a_message(
    folder: Path, cases: dict[str, Case]
) -> None:
    """All ranks go on to the next case together, so none has waited for another."""
    found = cases["budget"]
    assert found.code == 0, found.err
    reported = re.findall(r"observing costs .* the interval goes from 2 to (\d+) steps", found.err)
    assert len(reported) == 1
    assert int(reported[0]) >= 1000
    run = observations(folder, "budget")
    steps = [record["step"] for record in run]
    assert steps == [*range(2, steps[-1] + 1, 2)]
    assert steps[-1] < 24
    assert all(record["faults"] == [] for record in run)
