"""`--monitor` with every mode of `--parallel`: the numbers of one process, and faults by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import about_training
from trainer_cases import Case, run_cases

import distmon

COMMON = ["--heads=4", "--save-every=0", "--monitoring", "--monitor.interval=2"]
UP = "blocks.1.mlp.up.weight"
NORM = "blocks.1.norm1.weight"
COLUMNS = ("weight_norm", "weight_absmax", "grad_norm", "grad_max", "update_norm", "update_ratio")
FROZEN_STEPS = 8  # the rule waits for three observations


def case(name: str, *arguments: str) -> list[str]:
    return [*COMMON, "--steps=4", f"--monitor.run-dir={name}", *arguments]


def fault(mode: str, kind: str, *arguments: str) -> list[str]:
    plant = [f"--inject={kind}", "--inject-at=3"]
    return case(f"{kind}-{mode}", f"--parallel={mode}", *plant, *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every run of this file happens."""
    return tmp_path_factory.mktemp("monitored")


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, Case]:
    """All runs."""
    two = {mode: case(mode, f"--parallel={mode}") for mode in ("fsdp", "fsdp1", "tp", "pp")}
    two |= {f"nan-{mode}": fault(mode, "nan") for mode in ("fsdp1", "pp")}
    two["frozen-tp"] = fault("tp", "frozen", f"--steps={FROZEN_STEPS}")
    two["spike-pp"] = fault("pp", "spike", "--steps=8", "--inject-at=7")  # after 5 usual losses
    ending = ["--monitor.actions.stop=nonfinite", "--monitor.actions.checkpoint=nonfinite"]
    two["stopped"] = fault("fsdp", "nan", "--monitor.run-dir=stopped", "--steps=24", *ending)
    two["dead-fsdp1"] = fault("fsdp1", "dead", "--save-every=4", "--checkpoint-dir=dead")
    four = {
        "fsdp+tp": case("fsdp+tp", "--parallel=fsdp+tp"),
        "desync-hsdp": fault("hsdp", "desync"),
    }
    four["desync-fsdp+tp"] = fault("fsdp+tp", "desync")
    return {
        **run_cases(folder, 0, {"alone": case("alone")}),
        **run_cases(folder, 2, two),
        **run_cases(folder, 4, four),
    }


def table(folder: Path, name: str) -> dict[tuple[int, str], dict[str, Any]]:
    """The rows of a run by step and parameter."""
    rows = distmon.read_run(folder / name).params.to_pylist()
    return {(row["step"], row["name"]): row for row in rows}


@pytest.mark.parametrize("mode", ["fsdp", "fsdp1", "tp", "pp", "fsdp+tp"])
def test_a_clean_run_has_the_numbers_of_one_process(
    mode: str, folder: Path, cases: dict[str, Case]
) -> None:
    assert cases[mode].code == 0, cases[mode].err
    run, truth = (distmon.read_run(folder / name) for name in (mode, "alone"))
    assert about_training(run.alerts) == []
    assert run.losses == pytest.approx(truth.losses, rel=1e-5)
    found, expected = table(folder, mode), table(folder, "alone")
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        for column in COLUMNS:
            # The same elements are sampled; float32 sums in another order.
            assert found[key][column] == pytest.approx(row[column], rel=1e-5), (key, column)
    metrics = run.records[-1]["metrics"]
    # What the ranks report adds up to the global batch.
    tokens = metrics["performance/tokens_per_second"] * metrics["performance/step_seconds"]
    assert tokens == pytest.approx(8 * 32)


def test_a_rule_ends_all_ranks_together(folder: Path, cases: dict[str, Case]) -> None:
    """The ranks also go on together with the cases after it, or there would be none."""
    found = cases["stopped"]
    assert found.code == 86, found.err
    last = " ".join(found.out.split("stopped by nonfinite at step 4: ")[-1].split())
    # Which step it is depends on how soon rank 0 has evaluated; it is the same on all ranks.
    step = int(re.findall(r"; (\d+)/24 steps, train_loss nan, ", last)[0])
    assert 6 <= step < 24
    assert f"run folder stopped, checkpoint runs/checkpoints/step-{step:06}.pt" in last
    records = distmon.read_run(folder / "stopped").records
    steps = [record["step"] for record in records if not record["partial"]]
    assert steps[:2] == [2, 4]
    assert steps[-1] <= step
    saved = torch.load(folder / f"runs/checkpoints/step-{step:06}.pt", weights_only=True)
    assert saved["monitor"]["schedule"]["step"] == step


def test_shards_of_an_mlp_die_on_all_ranks(folder: Path, cases: dict[str, Case]) -> None:
    assert cases["dead-fsdp1"].code == 0, cases["dead-fsdp1"].err
    saved = torch.load(folder / "dead/step-000004.pt", weights_only=True)["model"]
    assert float(saved[UP].max()) < 0
    assert saved["blocks.1.norm2.bias"].tolist() == pytest.approx([1.0] * 32, abs=0.1)


@pytest.mark.parametrize(
    ("name", "rule", "step", "ranks", "params"),
    [
        ("nan-fsdp1", "nonfinite", 4, [1], [UP]),
        ("nan-pp", "nonfinite", 4, [1], [UP]),
        ("frozen-tp", "frozen", FROZEN_STEPS, [], [UP]),
        ("spike-pp", "loss_spike", 8, [], []),
        ("desync-hsdp", "replica_desync", 4, [3], [UP]),
        ("desync-fsdp+tp", "replica_desync", 4, [3], [NORM]),
    ],
)
def test_faults_are_named(
    name: str,
    rule: str,
    step: int,
    ranks: list[int],
    params: list[str],
    folder: Path,
    cases: dict[str, Case],
) -> None:
    assert cases[name].code == 0, cases[name].err
    alerts = about_training(distmon.read_run(folder / name).alerts)
    assert {alert["rule"] for alert in alerts} == {rule}
    (alert,) = [each for each in alerts if each["step"] == step]
    assert (alert["ranks"], alert["params"]) == (ranks, params)
