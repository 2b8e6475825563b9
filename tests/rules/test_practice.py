"""What healthy runs of practice do: losses that rise, parts that rest, weights that are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.record.evaluations import EvaluationHistory
from distmon.record.record import Record
from distmon.rules.alert import Alert

Numbers = Callable[[int], float]


def _records(
    losses: Numbers,
    count: int = 30,
    rows: Callable[[int], dict[str, dict[str, float]]] = lambda _: {"a.weight": {}},
    norm: Numbers = lambda _: 1.0,
    ratio: Numbers = lambda _: 1e-3,
    ranks: Callable[[int], dict[str, list[float]]] = lambda _: {},
    wobble: float = 0.002,
) -> list[Record]:
    """Records of ten steps each; losses by step, the rest by record."""
    records = []
    for i in range(count):
        end = 10 * (i + 1)
        steps = range(end - 9, end + 1)
        metrics = {
            "train/lr": 1e-3,
            "train/step_loss_ema": losses(end),
            "monitor/grad_norm": norm(i),
            "monitor/update_ratio_median": ratio(i),
        }
        records.append(
            make_record(
                end,
                rows(i),
                losses={s: losses(s) * (1 + wobble * (-1) ** s) for s in steps},
                loss_ema={s: losses(s) for s in steps},
                metrics=metrics,
                ranks={name: np.array(values) for name, values in ranks(i).items()},
            )
        )
    return records


def _all(records: Sequence[Record]) -> list[Alert]:
    engine = make_engine()
    return [alert for record in records for alert in alerts_of(engine, record)]


def _of(rule: str, records: Sequence[Record]) -> list[tuple[int, str]]:
    return [(a.step, a.severity) for a in _all(records) if a.rule == rule]


def _learned(step: int) -> float:
    return 0.1 + 2.2 * max(0.0, 1 - step / 100)


def test_a_loss_that_comes_down_again_does_not_diverge() -> None:
    """Another task begins at step 151."""

    def switch(step: int) -> float:
        return _learned(step) if step <= 150 else 0.1 + 2.0 * 0.95 ** (step - 151)

    assert _of("loss_divergence", _records(switch)) == []
    stays = _records(lambda step: _learned(step) if step <= 150 else 2.0, 60)
    assert _of("loss_divergence", stays) == [(170, "warning")]  # and it is not repeated


def test_gradients_may_grow_as_the_loss_does() -> None:
    """Targets, latents or distances that grow raise both; the run never had less to lose."""

    def grows(step: int) -> float:
        return 0.1 + 0.02 * step

    rows = {"a.weight": {"weight_norm": 1.0}}
    healthy = _records(grows, 60, lambda _: rows, norm=lambda i: 0.1 + 0.25 * i)
    assert {a.severity for a in _all(healthy)} <= {"info"}
    large = _records(grows, 60, norm=lambda i: 0.1 + 0.25 * i, ratio=lambda _: 0.1)
    assert "warning" in {severity for _, severity in _of("loss_divergence", large)}


def test_progress_that_was_never_made_is_not_lost() -> None:
    """A loss that measures a distance from where the run began."""
    early = _records(lambda step: 1e-5 * 1.1 ** min(step, 90), norm=lambda i: 1.0 + 0.01 * i)
    assert {severity for _, severity in _of("loss_divergence", early)} <= {"info"}


def test_a_gradient_is_high_if_it_grows_by_more_than_the_loss() -> None:
    def jumps(step: int) -> float:
        return _learned(step) if step <= 200 else 4.0

    def norm(i: int) -> float:
        return 0.1 if i < 20 else 3.9

    found = _of("grad_norm_high", _records(jumps, 24, norm=norm))
    assert found == []  # 39x its median, but the loss is 40x its own
    flat = _of("grad_norm_high", _records(_learned, 24, norm=lambda i: norm(i) * (1 + i % 2)))
    assert flat


def test_a_climb_with_gradients_in_proportion_is_not_uphill() -> None:
    def climb(step: int) -> float:
        return 1.0 - 0.002 * step if step <= 100 else 0.8 * 1.03 ** (step - 100)

    proportional = _records(climb, 25, norm=lambda i: climb(10 * i + 5))
    assert _of("wrong_sign", proportional) == []
    steeper = _records(climb, 25, norm=lambda i: climb(10 * i + 5) ** 2)
    assert _of("wrong_sign", steeper)


def test_a_loss_whose_sign_changes_in_the_run() -> None:
    def flips(step: int) -> float:
        return _learned(step) if step <= 150 else -0.1 * 1.1 ** (step - 150)

    found = _all(_records(flips, norm=lambda i: 1.0 + 2 * max(0, i - 14)))
    signs = [a for a in found if a.rule == "wrong_sign"]
    assert signs
    assert "its sign has changed" in signs[0].message
    slow = _records(lambda step: 2.0 - 0.02 * step, 40)  # a likelihood passes zero
    assert _of("wrong_sign", slow) == []


def _pruned(i: int, at: int = 20) -> dict[str, dict[str, float]]:
    norm = 10.0 if i < at else 7.0
    return {
        "a.weight": {"weight_norm": norm, "weight_absmax": 1.0, "weight_std": norm / 100},
        "b.weight": {"weight_absmax": 1.0},
    }


def test_what_pruning_does_to_the_loss_is_an_info() -> None:
    def raised(step: int) -> float:
        return _learned(step) if step <= 200 else 1.5

    (alert,) = [a for a in _all(_records(raised, 40, _pruned)) if a.rule == "loss_divergence"]
    assert alert.severity == "info"
    assert "since weights were pruned" in alert.message
    # A matrix that shrinks as a whole is not pruned.
    shrunk = _records(
        raised,
        40,
        lambda i: {"a.weight": {**_pruned(i)["a.weight"], "weight_absmax": 1.0 if i < 20 else 0.7}},
    )
    assert _of("loss_divergence", shrunk)[0][1] == "warning"


def _jump(i: int, at: Sequence[int]) -> dict[str, list[float]]:
    jumped = 1.1 if i in at else 0.01
    return {
        "weight_jump": [jumped],
        "weight_jump_expected": [0.01],
        "weight_jump_row": [0.0],
    }


def test_weights_that_are_replaced_on_schedule_are_named_twice() -> None:
    def resets(step: int) -> float:
        return _learned(step) + (2.0 * 0.6 ** ((step - 151) % 100) if step > 150 else 0.0)

    records = _records(resets, 60, ranks=lambda i: _jump(i, range(15, 60, 10)))
    assert _of("weights_replaced", records) == [(160, "warning"), (260, "info")]


def test_weights_that_are_replaced_without_a_trace_in_the_loss_are_an_info() -> None:
    """An adapter that is merged."""
    quiet = _records(_learned, 30, ranks=lambda i: _jump(i, [20]))
    assert _of("weights_replaced", quiet) == [(210, "info")]

    def later(step: int) -> float:
        return _learned(step) if step <= 210 else 2.0

    assert _of("weights_replaced", _records(later, 30, ranks=lambda i: _jump(i, [20]))) == [
        (210, "info"),
        (220, "warning"),
    ]


def _experts(rests: bool, both: bool = True) -> dict[str, dict[str, float]]:
    none = {"has_grad": 0.0, "update_ratio": 0.0, "update_norm": 0.0} if rests else {}
    table: dict[str, dict[str, float]] = {"stem.weight": {}}
    for n in range(3):
        for leaf in ("up", "down"):
            table[f"experts.{n}.{leaf}.weight"] = none if n == 2 and (both or leaf == "up") else {}
    return table


def test_an_expert_without_tokens_is_an_info_once() -> None:
    records = _records(_learned, 80, lambda i: _experts(i > 20 and i % 30 > 5))
    (alert,) = [a for a in _all(records) if a.rule == "frozen"]
    assert (alert.severity, alert.params) == (
        "info",
        ("experts.2.up.weight", "experts.2.down.weight"),
    )
    assert "part of experts is not used" in alert.message
    # A part of an expert that gets no gradient was cut off.
    cut = _records(_learned, 30, lambda i: _experts(i > 20, both=False))
    assert _of("frozen", cut) == [(240, "warning")]


def _ranks(losses: Callable[[int], list[float]]) -> Callable[[int], dict[str, list[float]]]:
    return lambda i: {"loss": losses(i)}


def test_a_rank_that_learns_nothing_is_named() -> None:
    """Its labels belong to other inputs, from the start: it was never like the others."""

    def mean(step: int) -> float:
        return 2.3 - 0.5 * min(1.0, step / 100)

    def shuffled(i: int) -> list[float]:
        return [2.3 - min(1.0, i / 10), 2.3]

    (alert,) = [a for a in _all(_records(mean, ranks=_ranks(shuffled))) if a.rule == "rank_outlier"]
    assert (alert.severity, alert.ranks) == ("warning", (1,))
    assert "its labels may not belong to its inputs" in alert.message

    def other_domain(i: int) -> list[float]:
        return [2.3 - min(1.0, i / 10), 4.0 - 0.6 * min(1.0, i / 10)]

    assert _of("rank_outlier", _records(mean, ranks=_ranks(other_domain))) == []


def test_spikes_like_those_before_are_no_news() -> None:
    def spikes(step: int) -> float:
        return 5.0 if step in (301, 501, 701) else 30.0 if step == 901 else 0.1 + 2 / step

    found = _of("loss_spike", _records(spikes, 100))
    assert [step for step, _ in found] == [310, 910]


def test_a_harder_batch_before_anything_is_learned_is_no_spike() -> None:
    def hard(step: int) -> float:
        return 3.0 if step == 151 else 2.3

    assert _of("loss_spike", _records(hard)) == []
    later = _records(lambda step: hard(step) * (0.5 if step > 20 else 1.0))
    assert [step for step, _ in _of("loss_spike", later)] == [160]


def test_first_steps_that_explode_need_no_second_sign() -> None:
    """The weights explode with the loss, so that updates look small."""

    def bursts(step: int) -> float:
        return 2.0 if step == 1 else 1e4

    assert _of("loss_spike", _records(bursts, 3))[0] == (10, "warning")
    assert _of("loss_spike", _records(lambda step: 2.0 if step == 1 else 40.0, 1)) == []


def test_a_saddle_that_is_left_is_not_insensitive() -> None:
    def flat(_: int) -> float:
        return 2.3

    def rows(growth: float) -> Callable[[int], dict[str, dict[str, float]]]:
        return lambda i: {"a.weight": {"grad_norm": 1e-5 * growth**i, "weight_norm": 10.0}}

    assert _of("loss_insensitive", _records(flat, 8, rows(1.8))) == []
    assert _of("loss_insensitive", _records(flat, 8, rows(1.0))) == [(40, "warning")]


def test_a_loss_of_exactly_zero_is_named() -> None:
    """Every label is ignored."""
    dead = {"a.weight": {"grad_norm": 0.0, "grad_zero_fraction": 1.0}}
    assert _of("loss_insensitive", _records(lambda _: 0.0, 8, lambda _: dead))


def test_decay_at_a_rate_that_is_too_high_is_blamed_on_the_rate() -> None:
    records = _records(lambda _: 2.3, 6, ranks=lambda _: {"decay_per_step": [0.03]})
    for record in records:
        record.metrics["train/lr"] = 3.0  # type: ignore[index]
    (alert,) = [a for a in _all(records) if a.rule == "weight_decay_high"]
    assert "halve the learning rate" in alert.advice[0]


@pytest.mark.parametrize(
    ("val", "severity"),
    [
        ([1.0, 0.6, 0.5, 0.5, 0.61], "info"),  # 22% above its best: 6% of what was gained
        ([1.9, 1.6, 1.5, 1.5, 2.1], "warning"),  # most of it
    ],
)
def test_a_validation_loss_that_rises_is_a_warning_once_half_is_lost(
    val: list[float], severity: str
) -> None:
    assert _evaluated(val, "val_increase") == [severity]


def test_a_model_that_learns_by_heart_may_generalize() -> None:
    assert _evaluated([1.0, 0.6, 0.5, 0.5, 0.5], "overfit", 0.01) == ["info"]
    assert _evaluated([2.2] * 5, "overfit", 0.01)[-1] == "warning"


def _evaluated(val: list[float], rule: str, train: float = 0.3) -> list[str]:
    history, found = EvaluationHistory(), make_engine()
    severities = []
    for i, record in enumerate(_records(_learned, 60)):
        if i % 12 == 11:
            # Training falls all along.
            each = history.take(record.step, None, train * 0.9 ** (i // 12), val[i // 12])
            record = make_record(
                record.step, losses=record.losses, metrics=record.metrics, evaluations=(each,)
            )
        severities += [a.severity for a in alerts_of(found, record) if a.rule == rule]
    return severities


def test_underfitting_is_not_said_of_a_loss_that_has_come_down_far() -> None:
    history = EvaluationHistory()
    evaluations = [history.take(s, None, t, v) for s, t, v in ((100, 1.1, 1.1), (200, 1.0, 1.0))]
    found: list[Alert] = []
    engine = make_engine()
    for record in _records(lambda step: 2.3 - 1.3 * min(1.0, step / 100), 20):
        if record.step % 100 == 0:
            record = make_record(
                record.step,
                losses=record.losses,
                metrics=record.metrics,
                evaluations=(evaluations[record.step // 100 - 1],),
            )
        found += alerts_of(engine, record)
    assert [a for a in found if a.rule == "underfit"] == []


def test_parameters_that_are_switched_on_after_a_while_can_learn() -> None:
    def rows(until: int) -> Callable[[int], dict[str, dict[str, Any]]]:
        return lambda i: {"a.weight": {"requires_grad": float(i >= until)}, "b.weight": {}}

    assert _of("cannot_learn", _records(_learned, 20, rows(8))) == []
    assert _of("cannot_learn", _records(_learned, 20, rows(99))) == [(100, "info")]
