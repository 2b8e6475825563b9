from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import begin

from benchmarks.contenders import CONTENDERS
from distmon.bench import truth
from distmon.bench.contender import Answer, Norms, Session, find
from distmon.bench.truth import ROUNDING, AnswerCheck, Truth, TruthSession, check_answer

RACING = [c.name for c in CONTENDERS if c.finds and c.unavailable() is None]
ROUNDED = ROUNDING[torch.float32]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answer of a contender about a step, and the truth; each is asked once."""
    folder: Path = tmp_path_factory.mktemp("answered")

    @cache
    def ask(name: str) -> tuple[Answer, dict[str, Truth]]:
        training = begin()
        (contender,) = find([name], CONTENDERS)
        session = contender.attach(training.model, training.optimizer, folder / name)
        exact = TruthSession(session, training.model)
        training.step(exact)
        session.detach()
        return session.answer(), exact.truth

    return ask


@pytest.mark.parametrize("name", RACING)
def test_every_contender_is_right_and_a_false_answer_is_found(answered: Any, name: str) -> None:
    answer, right = answered(name)
    (contender,) = find([name], CONTENDERS)
    check = check_answer(contender.finds, answer, right, ROUNDED)
    assert (check.wrong, check.far_off) == (None, 0)
    for what in contender.finds:
        for parameter in ("wte.weight", "blocks.1.qkv.weight"):
            norms = answer[parameter]
            # Twice as much, and beyond its stated error.
            value = 2 * getattr(norms, what) + 10 * getattr(norms, f"{what}_error")
            false = {**answer, parameter: replace(norms, **{what: value})}
            found = check_answer(contender.finds, false, right, ROUNDED).wrong
            assert found is not None
            assert found.startswith(f"the {what} norm of {parameter} is ")


def test_what_is_left_out_is_wrong(answered: Any) -> None:
    answer, right = answered("naive clone")
    less = {name: norms for name, norms in answer.items() if name != "norm.bias"}
    found = check_answer(("grad",), less, right, ROUNDED).wrong
    assert found is not None
    assert found.startswith("the grad norm of norm.bias is ")
    assert found.endswith("not None")


def test_a_gradient_that_is_not_there_is_wrong() -> None:
    right = {"w": Truth(weight=1.0, grad=None, update=0.0)}
    assert check_answer(("grad",), {"w": Norms(grad=None)}, right, ROUNDED).wrong is None
    assert check_answer(("grad",), {"w": Norms(grad=0.0)}, right, ROUNDED).wrong is None
    assert check_answer(("grad",), {"w": Norms(grad=0.1)}, right, ROUNDED).wrong is not None


def _estimates(off: float, error: float, certain: bool = False) -> str | None:
    """Ten parameters of norm 1, each `off` from it."""
    right = {str(i): Truth(weight=9.0, grad=1.0, update=0.0) for i in range(10)}
    answer = {n: Norms(grad=1.0 + off, grad_error=error, certain=certain) for n in right}
    return check_answer(("grad",), answer, right, ROUNDED).wrong


def test_standard_errors_have_to_be_right() -> None:
    assert _estimates(0.01, 0.01) is None
    typical = "grad norms are typically 4.0 standard errors off"
    assert _estimates(0.04, 0.01) == f"{typical} (and 1 more)", "the total norm is wrong too"
    assert "not 1.6 with an error of 0.01" in str(_estimates(0.6, 0.01))
    assert _estimates(0.01, 0.5) == "grad norms have a standard error of 50%, typically"


def test_few_estimates_may_be_far_off_and_they_are_counted() -> None:
    right = {str(i): Truth(weight=9.0, grad=1.0, update=0.0) for i in range(100)}

    def far(number: int) -> AnswerCheck:
        answer = {
            name: Norms(grad=1.2 if int(name) < number else 1.0, grad_error=0.01) for name in right
        }
        return check_answer(("grad",), answer, right, ROUNDED)

    assert far(2) == AnswerCheck((), estimates=100, far_off=2)
    assert far(6).problems[0] == "6 of 100 grad norms are more than 6 standard errors off"


def test_nobody_has_to_add_better_than_torch() -> None:
    right = {"w": Truth(weight=9.0, grad=1.0, update=0.0, torch_off={"grad": 0.01})}
    assert check_answer(("grad",), {"w": Norms(grad=1.019)}, right, ROUNDED).wrong is None
    assert check_answer(("grad",), {"w": Norms(grad=1.021)}, right, ROUNDED).wrong is not None


def test_a_certain_error_is_not_multiplied() -> None:
    assert _estimates(0.1, 0.1, certain=True) is None
    assert _estimates(0.12, 0.1, certain=True) is not None


def test_a_weight_may_be_that_before_the_step() -> None:
    right = {"w": Truth(weight=10.0, grad=1.0, update=0.5)}
    assert check_answer(("weight",), {"w": Norms(weight=10.5)}, right, ROUNDED).wrong is None
    assert check_answer(("weight",), {"w": Norms(weight=10.6)}, right, ROUNDED).wrong is not None


def test_norms_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "CHUNK", 7)
    a, b = torch.randn(4, 5), torch.randn(4, 5)
    assert truth.norm(a) == pytest.approx(a.double().norm().item(), rel=1e-12)
    assert truth.norm(a, b) == pytest.approx((a.double() - b.double()).norm().item(), rel=1e-12)


def test_the_truth_is_that_of_the_step() -> None:
    training = begin()
    before = {n: p.detach().clone() for n, p in training.model.named_parameters()}
    exact = TruthSession(Session(), training.model)
    training.step(exact)
    for name, p in training.model.named_parameters():
        found = exact.truth[name]
        assert p.grad is not None
        assert found.grad == pytest.approx(p.grad.double().norm().item())
        assert found.update == pytest.approx((p.detach() - before[name]).norm().item(), rel=1e-4)
        assert found.update != 0


def test_a_sample_that_misses_a_few_heavy_rows_is_wrong() -> None:
    """As in the gradient of an embedding: the estimate is small, and so is its standard error."""
    right = {"w": Truth(weight=9.0, grad=1.0, update=0.0)}
    check = check_answer(("grad",), {"w": Norms(grad=0.1, grad_error=0.001)}, right, ROUNDED)
    assert check.problems[0] == "the grad norm of w is 1, not 0.1 with an error of 0.001"
    assert "(and 1 more)" in str(check.wrong), "the total norm is wrong too"


def test_one_estimate_that_outweighs_all_others_makes_the_total_wrong() -> None:
    """Alone it may be far off, as few estimates may; but it is most of the total norm."""
    right = {str(i): Truth(weight=9.0, grad=1.0, update=0.0) for i in range(99)}
    right["embedding"] = Truth(weight=9.0, grad=30.0, update=0.0)
    answer = {name: Norms(grad=truth.grad, grad_error=0.02) for name, truth in right.items()}
    assert check_answer(("grad",), answer, right, ROUNDED).wrong is None
    answer["embedding"] = Norms(grad=18.0, grad_error=0.5)
    assert check_answer(("grad",), answer, right, ROUNDED).problems == (
        "the total grad norm is 31.607, not 20.567 with an error of 0.438",
    )


def test_a_norm_that_is_no_number_is_wrong() -> None:
    right = {"w": Truth(weight=9.0, grad=1.0, update=0.0)}
    answer = {"w": Norms(grad=float("nan"))}
    assert check_answer(("grad",), answer, right, ROUNDED).wrong is not None
