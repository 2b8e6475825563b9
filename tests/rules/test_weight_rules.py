"""Weights that jump, grow apart, or begin apart."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.rules.alert import Alert

UP = "blocks.{}.mlp.up.weight"


def _stds(values: list[float], name: str = UP, **numbers: float) -> dict[str, dict[str, float]]:
    return {name.format(i): {"weight_std": std, **numbers} for i, std in enumerate(values)}


def _run(tables: list[dict[str, dict[str, float]]], first: int = 300) -> list[Alert]:
    engine = make_engine()
    return [a for i, t in enumerate(tables) for a in alerts_of(engine, make_record(first + i, t))]


@pytest.mark.parametrize(
    ("before", "after", "jumps"),
    [
        ({"weight_std": 0.02}, {"weight_std": 0.19}, False),
        ({"weight_std": 0.02}, {"weight_std": 0.21}, True),
        # Weights that start at zero grow by any factor, up to an ordinary size.
        ({"weight_std": 1e-8}, {"weight_std": 0.009}, False),
        ({"weight_std": 1e-8}, {"weight_std": 0.02}, True),
        # What did not learn may begin to.
        ({"weight_std": 1e-4, "update_ratio": 0.0}, {"weight_std": 0.5}, False),
        ({"weight_std": 0.02}, {"weight_std": math.nan}, False),
        ({"weight_std": math.inf}, {"weight_std": 1.0}, False),
    ],
)
def test_a_sudden_growth(before: dict[str, float], after: dict[str, float], jumps: bool) -> None:
    found = _run([{"a.w": before, "b.w": {}}, {"a.w": after, "b.w": {}}])
    assert [(a.rule, a.params) for a in found] == [("weight_norm_spike", ("a.w",))] * jumps


def test_a_jump_is_reported_once_and_also_across_a_skipped_step() -> None:
    small, large = {"w": {"weight_std": 0.02}}, {"w": {"weight_std": 0.4}}
    skipped = {"w": {"weight_std": 0.02, "update_ratio": math.nan}}
    (alert,) = _run([small, skipped, large, large, large])
    assert alert.message == (
        "the norm of w jumped from 2 to 40, 20x in one observation (limit 10x)"
    )
    assert alert.step == 302


@pytest.mark.parametrize(
    ("table", "apart"),
    [
        (_stds([0.1, 0.1, 1e-5, 0.1]), True),
        (_stds([0.1, 0.1, 2e-4, 0.1]), False),
        (_stds([0.1, 0.1, 0.0, 0.1]), False),
        (_stds([0.1, 0.1, math.nan, 0.1]), False),
        (_stds([0.1, 1e-5], ndim=1.0), False),
        # Layers of another size, as in a pyramid, are not of one kind.
        ({**_stds([0.1]), UP.format(1): {"weight_std": 1e-3, "weight_norm": 5e-3}}, False),
        ({"embed.weight": {"weight_std": 1e-6}, **_stds([0.1, 0.1])}, False),
    ],
)
def test_layers_with_very_different_norms(table: dict[str, dict[str, float]], apart: bool) -> None:
    found = _run([table] * 3)
    assert [a.rule for a in found] == ["weight_divergence"] * apart
    for alert in found:
        assert alert.params[1] == UP.format(2)
        assert alert.layers == ("blocks.0", "blocks.2")
        assert "ratio 10000 (limit 1000)" in alert.message


_NOISE = random.Random(0)


@pytest.mark.parametrize(
    ("stds", "bad"),
    [
        ([0.02, 0.02, 0.2, 0.02], True),
        ([0.08, 0.02, 0.02, 0.02], True),
        ([0.02, 0.06], False),
        # One scale for all, as 0.02 / sqrt(2 x layers), seen through a sample.
        ([0.0071 * _NOISE.uniform(0.95, 1.05) for _ in range(24)], False),
        # Scaled with depth on purpose: 0.02 / sqrt(2 x (layer + 1)).
        ([0.02 / math.sqrt(2 * (i + 1)) for i in range(32)], False),
        ([0.02, math.nan, 0.02, 0.0], False),
    ],
)
def test_a_bad_start(stds: list[float], bad: bool) -> None:
    found = _run([_stds(stds)] * 3, first=1)
    assert [a.rule for a in found] == ["bad_init"] * bad


def test_which_first_steps_are_evaluated() -> None:
    table = _stds([0.02, 0.5, 0.02])
    (alert,) = _run([table], first=1)
    assert alert.params == (UP.format(1), UP.format(0))
    assert "std 5.00e-01 and those of blocks.0.mlp.up.weight with 2.00e-02" in alert.message
    assert len(_run([table], first=100)) == 1  # the first look counts for a while
    assert _run([_stds([0.02, 0.03, 0.02]), _stds([0.02, 0.19, 0.02])], first=11) == []  # learned
    assert _run([table], first=5000) == []  # a run that goes on
    assert _run([_stds([0.02, 0.5], ndim=1.0)], first=1) == []
    # Convolutions in a sequence: 27 inputs each, then 576, and so other scales.
    sequence = {
        "features.0.weight": {"weight_std": 0.27, "weight_norm": 11.0},
        "features.3.weight": {"weight_std": 0.06, "weight_norm": 16.0},
    }
    assert _run([sequence], first=1) == []


def test_roles_that_start_badly_share_an_alert() -> None:
    table = {**_stds([0.02, 0.5]), **_stds([0.02, 0.4], "blocks.{}.attn.out.weight")}
    (alert,) = _run([table], first=1)
    assert alert.message.endswith("; also blocks.*.attn.out.weight")


def test_modules_of_a_sequence_may_be_of_different_kinds() -> None:
    """As nn.Embedding, which starts with a standard deviation of 1, and an output layer."""
    embedding, head = {"weight_std": 1.0}, {"weight_std": 0.07}
    bias = {"ndim": 1.0}
    assert _run([{"0.weight": embedding, "2.weight": head}], first=1) == []
    layers = {f"{i}.{leaf}": d for i in (1, 2, 3) for leaf, d in (("weight", head), ("bias", bias))}
    assert _run([{"0.weight": embedding, **layers}], first=1) == []
    (alert,) = _run([{**layers, "4.weight": {"weight_std": 0.7}, "4.bias": bias}], first=1)
    assert alert.rule == "bad_init"
    assert alert.params[0] == "4.weight"


@pytest.mark.parametrize(("rate", "replaced"), [(1e-3, True), (0.5, False)])
def test_what_changes_while_the_rate_jumps_was_not_replaced(rate: float, replaced: bool) -> None:
    engine = make_engine()
    change = {"weight_jump": 0.7, "weight_jump_expected": 0.1, "weight_jump_row": 0.0}
    ranks = {name: np.array([value]) for name, value in change.items()}
    alerts_of(engine, make_record(300, metrics={"train/lr": 1e-3}))
    found = alerts_of(engine, make_record(310, metrics={"train/lr": rate}, ranks=ranks))
    assert ("weights_replaced" in [a.rule for a in found]) == replaced


BIAS = {"ndim": 1.0, "weight_mean": 0.1, "weight_std": 0.2, "update_ratio": 0.01}


def _bias(**changed: float) -> dict[str, dict[str, float]]:
    """A bias of 64 elements, and a matrix beside it."""
    row = {**BIAS, **changed}
    norm = 8 * math.hypot(row["weight_mean"], row["weight_std"])
    sizes = {"weight_norm": norm, "update_norm": norm * row["update_ratio"]}
    return {"a.bias": {**row, **sizes}, "a.weight": {}}


@pytest.mark.parametrize(
    ("after", "replaced"),
    [
        ({"weight_mean": 0.0, "weight_std": 0.001}, True),
        ({"weight_mean": -0.1}, True),
        ({"weight_mean": 0.1, "weight_std": 0.6}, True),
        # Ten steps of 1% move it by 10% at most; 25% is less than three times that.
        ({"weight_std": 0.25}, False),
        # A large update explains a large change.
        ({"weight_mean": 0.0, "weight_std": 0.05, "update_ratio": 0.2}, False),
    ],
)
def test_a_vector_that_was_replaced(after: dict[str, float], replaced: bool) -> None:
    engine = make_engine()
    tables = [_bias(), _bias(), _bias(), _bias(**after), _bias(**after)]
    records = [make_record(100 + 10 * i, table) for i, table in enumerate(tables)]
    found = [a for record in records for a in alerts_of(engine, record)]
    named = [(a.rule, a.step, a.params) for a in found if a.rule == "weights_replaced"]
    assert named == [("weights_replaced", 130, ("a.bias",))] * replaced


def test_a_vector_whose_rate_changed_was_not_replaced() -> None:
    engine = make_engine()
    tables = [_bias(), _bias(), _bias(), _bias(weight_mean=-0.1)]
    rates = (1e-3, 1e-3, 1e-3, 1e-2)
    records = [
        make_record(100 + 10 * i, table, metrics={"train/lr": rate})
        for i, (table, rate) in enumerate(zip(tables, rates, strict=True))
    ]
    rules = [a.rule for record in records for a in alerts_of(engine, record)]
    assert "weights_replaced" not in rules
