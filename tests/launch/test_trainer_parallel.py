"""Every mode of `--parallel` trains as one process does, and continues what any other has saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import Case, run_cases

from launch.model import GPT, Shape

# The small limit makes every step depend on the norm of the gradient. The 51 sequences of an
# evaluation are shared out unevenly, and its last pass is a small one.
COMMON = [
    *("--layers=4", "--heads=4", "--batch-size=16", "--steps=4", "--warmup=2", "--clip=0.05"),
    *("--eval-every=2", "--eval-sequences=51", "--save-every=2", "--keep=9"),
]
# 33 positions cannot be cut evenly. The momentum of SGD is the only state that it has.
ODD = [
    *("--context=33", "--tied", "--accumulate=2", "--optimizer=sgd", "--lr=1"),
    *("--activation=relu", "--no-residual", "--init-std=0.1"),
]
PRINTED = 1.1e-4  # the last of four decimals may be rounded the other way
TOLERANCE = 1e-5
UP = "blocks.2.mlp.up.weight"
FROZEN = [*("--inject=frozen", "--inject-at=1", f"--inject-param={UP}"), "--eval-every=0"]
NAN = [*("--inject=nan", "--inject-at=2", "--steps=3"), "--eval-every=0", "--save-every=0"]


def case(folder: str, *arguments: str) -> list[str]:
    return [*COMMON, f"--checkpoint-dir={folder}", *arguments]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every run of this file happens."""
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Case]:
    """The truth: one process."""
    return run_cases(folder, 0, {"truth": case("truth"), "odd": case("odd", *ODD)})


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, Case]:
    """What four ranks do."""
    cases = {
        "hsdp": case("hsdp", "--parallel=hsdp"),
        "fsdp+tp": case("fsdp+tp", "--parallel=fsdp+tp", "--accumulate=2"),
        "pp": case("pp", "--parallel=pp"),
    }
    return run_cases(folder, 4, cases)


@pytest.fixture(scope="module")
def two(folder: Path, alone: dict[str, Case], four: dict[str, Case]) -> dict[str, Case]:
    """What two ranks do, some of it from what others have saved."""
    assert alone
    assert four
    cases = {
        # First, because a mesh that it does not let go of is then the one that caches keep.
        "desync in fsdp": case("6", "--parallel=fsdp", "--inject=desync", "--inject-at=1"),
        "fsdp": case("fsdp", "--parallel=fsdp", "--accumulate=2"),
        "tp": case("tp", "--parallel=tp"),
        "odd fsdp1": case("odd fsdp1", "--parallel=fsdp1", *ODD),
        "ddp after fsdp+tp": case("1", "--resume=fsdp+tp/step-000002.pt"),
        "fsdp1 after hsdp": case("2", "--parallel=fsdp1", "--resume=hsdp/step-000002.pt"),
        "tp after pp": case("3", "--parallel=tp", "--resume=pp/step-000002.pt"),
        "pp after tp": case("4", "--parallel=pp", "--resume=tp/step-000002.pt"),
        "odd fsdp after fsdp1": case(
            "5", "--parallel=fsdp", "--resume=odd fsdp1/step-000002.pt", *ODD
        ),
    }
    for mode in ("fsdp", "fsdp1", "tp", "pp"):
        cases[f"nan in {mode}"] = case("7", f"--parallel={mode}", *NAN)
        cases[f"frozen in {mode}"] = case(f"frozen {mode}", f"--parallel={mode}", *FROZEN)
    for mode in ("ddp", "fsdp1"):
        middle = "--resume=frozen fsdp/step-000002.pt"
        cases[f"{mode} after frozen"] = case(f"8 {mode}", f"--parallel={mode}", middle, *FROZEN)
    return run_cases(folder, 2, cases)


def saved(folder: Path, name: str) -> dict[str, Any]:
    """The last checkpoint in a folder."""
    return torch.load(folder / name / "step-000004.pt", weights_only=True)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the size of what is expected."""
    return float((found - expected).norm() / expected.norm())


def assert_same_state(folder: Path, name: str, truth: str) -> None:
    """Weights and optimizer state of two folders agree up to float32 sums in another order."""
    found, expected = saved(folder, name), saved(folder, truth)
    assert found["model"].keys() == expected["model"].keys()
    assert found["optimizer"].keys() == expected["optimizer"].keys()
    for key, weight in expected["model"].items():
        assert distance(found["model"][key], weight) < TOLERANCE, key
    moments = {"adamw": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
    for key, state in expected["optimizer"].items():
        assert found["optimizer"][key].keys() == state.keys() >= moments[expected["algorithm"]]
        assert found["optimizer"][key].get("step", 4) == state.get("step", 4) == 4
        for moment in moments[expected["algorithm"]]:
            ours, theirs = found["optimizer"][key][moment], state[moment]
            assert distance(ours, theirs) < TOLERANCE, (key, moment)


@pytest.mark.parametrize("mode", ["hsdp", "fsdp+tp", "pp"])
def test_four_ranks_train_as_one_process(
    mode: str, folder: Path, alone: dict[str, Case], four: dict[str, Case]
) -> None:
    assert four[mode].code == 0
    assert four[mode].losses == pytest.approx(alone["truth"].losses, abs=PRINTED)
    assert four[mode].validation == pytest.approx(alone["truth"].validation, abs=PRINTED)
    assert_same_state(folder, mode, "truth")


@pytest.mark.parametrize("name", ["fsdp", "tp", "odd fsdp1"])
def test_two_ranks_train_as_one_process(
    name: str, folder: Path, alone: dict[str, Case], two: dict[str, Case]
) -> None:
    truth = "odd" if "odd" in name else "truth"
    assert two[name].code == 0
    assert two[name].losses == pytest.approx(alone[truth].losses, abs=PRINTED)
    assert two[name].validation == pytest.approx(alone[truth].validation, abs=PRINTED)
    assert_same_state(folder, name, truth)


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("ddp after fsdp+tp", "1"),
        ("fsdp1 after hsdp", "2"),
        ("tp after pp", "3"),
        ("pp after tp", "4"),
        ("odd fsdp after fsdp1", "5"),
    ],
)
def test_any_mode_continues_any_other(
    name: str, there: str, folder: Path, alone: dict[str, Case], two: dict[str, Case]
) -> None:
    truth = "odd" if "odd" in name else "truth"
    expected = {step: alone[truth].losses[step] for step in (3, 4)}
    assert two[name].losses == pytest.approx(expected, abs=PRINTED)
    assert_same_state(folder, there, truth)


@pytest.mark.parametrize("mode", ["fsdp", "fsdp1", "tp", "pp"])
def test_nan_in_one_shard_reaches_all_ranks(mode: str, two: dict[str, Case]) -> None:
    losses = two[f"nan in {mode}"].losses
    assert [math.isnan(losses[step]) for step in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize("mode", ["fsdp", "fsdp1", "tp", "pp"])
def test_frozen_shards_stay_and_have_no_state(
    mode: str, folder: Path, two: dict[str, Case]
) -> None:
    assert two[f"frozen in {mode}"].code == 0
    found = saved(folder, f"frozen {mode}")
    torch.manual_seed(0)
    initial = GPT(Shape(layers=4, width=32, heads=4, context=32)).state_dict()
    assert {name for name in initial if torch.equal(found["model"][name], initial[name])} == {UP}
    assert set(initial) - set(found["optimizer"]) == {UP}


@pytest.mark.parametrize("mode", ["ddp", "fsdp1"])
def test_a_parameter_without_state_is_resumed_without(
    mode: str, folder: Path, two: dict[str, Case]
) -> None:
    assert two[f"{mode} after frozen"].code == 0
    assert_same_state(folder, f"8 {mode}", "frozen fsdp")


def test_desync_without_copies_is_refused(two: dict[str, Case]) -> None:
    assert two["desync in fsdp"].code == 2
    sentence = "--inject desync needs copies, and --parallel fsdp makes none"
    assert two["desync in fsdp"].err == f"train.py: {sentence}\n"
