from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import begin

from distmon_benchmarks import truth
from distmon_benchmarks.contenders import CONTENDERS, Norms, Session, find
from distmon_benchmarks.contenders.contender import Answer
from distmon_benchmarks.truth import ROUNDING, Referee, Truth, Verdict, in_few_rows, judge

RACING = [c.name for c in CONTENDERS if c.finds and c.unavailable() is None]
ROUNDED = ROUNDING[torch.float32]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a contender says of a step, and the truth about it; each is asked once."""
    folder: Path = tmp_path_factory.mktemp("told")

    @cache
    def ask(name: str) -> tuple[Answer, dict[str, Truth]]:
        training = begin()
        (contender,) = find([name])
        session = contender.attach(training.model, training.optimizer, folder / name)
        referee = Referee(session, training.model)
        training.turn(referee)
        session.detach()
        return session.answer(), referee.truth

    return ask


@pytest.mark.parametrize("name", RACING)
def test_every_contender_tells_the_truth_and_none_may_lie(told: Any, name: str) -> None:
    answer, right = told(name)
    (contender,) = find([name])
    verdict = judge(contender.finds, answer, right, ROUNDED)
    assert (verdict.problem, verdict.not_judged, verdict.far_off) == (None, (), 0)
    for what in contender.finds:
        for parameter in ("wte.weight", "blocks.1.qkv.weight"):
            said = answer[parameter]
            # Twice as much, and beyond whatever it says about its error.
            value = 2 * getattr(said, what) + 10 * getattr(said, f"{what}_error")
            lying = {**answer, parameter: replace(said, **{what: value})}
            found = judge(contender.finds, lying, right, ROUNDED).problem
            assert found is not None
            assert found.startswith(f"the {what} norm of {parameter} is ")


def test_what_is_left_out_is_wrong(told: Any) -> None:
    answer, right = told("naive clone")
    less = {name: norms for name, norms in answer.items() if name != "norm.bias"}
    found = judge(("grad",), less, right, ROUNDED).problem
    assert found is not None
    assert found.startswith("the grad norm of norm.bias is ")
    assert found.endswith("not None")


def test_a_gradient_that_is_not_there_is_wrong() -> None:
    right = {"w": Truth(weight=1.0, grad=None, update=0.0)}
    assert judge(("grad",), {"w": Norms(grad=None)}, right, ROUNDED).problem is None
    assert judge(("grad",), {"w": Norms(grad=0.0)}, right, ROUNDED).problem is None
    assert judge(("grad",), {"w": Norms(grad=0.1)}, right, ROUNDED).problem is not None


def _estimates(off: float, error: float, certain: bool = False) -> str | None:
    """Ten parameters of norm 1, each `off` from it."""
    right = {str(i): Truth(weight=9.0, grad=1.0, update=0.0) for i in range(10)}
    said = {n: Norms(grad=1.0 + off, grad_error=error, certain=certain) for n in right}
    return judge(("grad",), said, right, ROUNDED).problem


def test_standard_errors_have_to_be_right() -> None:
    assert _estimates(0.01, 0.01) is None
    assert _estimates(0.04, 0.01) == "grad norms are typically 4.0 standard errors off"
    assert "not 1.6 with an error of 0.01" in str(_estimates(0.6, 0.01))
    assert _estimates(0.01, 0.5) == "grad norms have a standard error of 50%, typically"


def test_few_estimates_may_be_far_off_and_they_are_counted() -> None:
    right = {str(i): Truth(weight=9.0, grad=1.0, update=0.0) for i in range(100)}

    def far(number: int) -> Verdict:
        said = {
            name: Norms(grad=1.2 if int(name) < number else 1.0, grad_error=0.01) for name in right
        }
        return judge(("grad",), said, right, ROUNDED)

    assert far(5) == Verdict(None, (), judged=100, far_off=5)
    assert far(6).problem == "6 of 100 grad norms are more than 6 standard errors off"


def test_nobody_has_to_add_better_than_torch() -> None:
    right = {"w": Truth(weight=9.0, grad=1.0, update=0.0, torch_off={"grad": 0.01})}
    assert judge(("grad",), {"w": Norms(grad=1.019)}, right, ROUNDED).problem is None
    assert judge(("grad",), {"w": Norms(grad=1.021)}, right, ROUNDED).problem is not None


def test_a_limit_that_is_certain_is_none_to_multiply() -> None:
    assert _estimates(0.1, 0.1, certain=True) is None
    assert _estimates(0.12, 0.1, certain=True) is not None


def test_a_weight_may_be_that_before_the_step() -> None:
    right = {"w": Truth(weight=10.0, grad=1.0, update=0.5)}
    assert judge(("weight",), {"w": Norms(weight=10.5)}, right, ROUNDED).problem is None
    assert judge(("weight",), {"w": Norms(weight=10.6)}, right, ROUNDED).problem is not None


def test_norms_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "PIECE", 7)
    a, b = torch.randn(4, 5), torch.randn(4, 5)
    assert truth.norm(a) == pytest.approx(a.double().norm().item(), rel=1e-12)
    assert truth.norm(a, b) == pytest.approx((a.double() - b.double()).norm().item(), rel=1e-12)


def test_the_referee_sees_the_step_that_was_made() -> None:
    training = begin()
    before = {n: p.detach().clone() for n, p in training.model.named_parameters()}
    referee = Referee(Session(), training.model)
    training.turn(referee)
    for name, p in training.model.named_parameters():
        found = referee.truth[name]
        assert p.grad is not None
        assert found.grad == pytest.approx(p.grad.double().norm().item())
        assert found.update == pytest.approx((p.detach() - before[name]).norm().item(), rel=1e-4)
        assert found.update != 0


def test_only_a_sample_may_miss_what_lies_in_few_rows() -> None:
    right = {"w": Truth(weight=9.0, grad=1.0, update=0.0, in_few_rows=frozenset({"grad"}))}
    sampled = {"w": Norms(grad=0.1, grad_error=0.001)}
    assert judge(("grad",), sampled, right, ROUNDED) == Verdict(None, ("grad of w",))
    for said in (Norms(grad=0.1), Norms(grad=0.1, grad_error=0.001, certain=True)):
        assert judge(("grad",), {"w": said}, right, ROUNDED).problem is not None
    spread = torch.ones(300, 4)
    assert not in_few_rows(spread)
    spread[[5, 7, 11]] = 100.0
    assert in_few_rows(spread)
    assert not in_few_rows(torch.tensor([1.0] * 299 + [1e6]))
