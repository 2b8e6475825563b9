"""No speed number for a wrong answer: compare what a contender reports with float64 norms.

The truth is computed from copies of all weights and gradients. A contender that reads every element
may be as far off as torch's own norm of that tensor. One that samples states a standard error:
typical estimates have to be within it, nearly all within a few times it, and none may be grossly
wrong. So does the total norm, where one parameter may outweigh all others. Every norm of every
parameter is checked; there are no exceptions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import torch
from torch import nn

from distmon.bench.contender import Answer, Norms, Session, trainable_parameters

ROUNDING: Final[Mapping[torch.dtype, float]] = {torch.float32: 1e-4, torch.bfloat16: 2.0**-8}
"""Allowed relative error of a norm that was not sampled: torch rounds that of a bfloat16 tensor to
bfloat16."""
AS_TORCH: Final = 2.0
"""Times the error of torch's own norm. It adds squares in float32, where small ones are lost beside
a large sum: 0.24% were missing in the gradient of GPT-2's embedding."""
TYPICAL_ERRORS: Final = 2.0
"""The median estimate has to be within this many standard errors."""
FAR_ERRORS: Final = 6.0
FAR_SHARE: Final = 0.05
"""At most this share of the estimates may be more than FAR_ERRORS off. The standard error is itself
an estimate from 8 groups, of values that are not normally distributed."""
GROSS_ERRORS: Final = 10.0
GROSS_SHARE: Final = 0.5
"""No estimate may be off by more than both: so many standard errors, this share of the norm."""
USEFUL: Final = 0.1
"""A standard error that is typically above this share of the norm is of no use."""
CHUNK: Final = 2**22
"""Elements that are widened to float64 at a time."""


@dataclass(frozen=True)
class Truth:
    """The norms of one parameter in one step."""

    weight: float
    grad: float | None
    update: float
    torch_off: Mapping[str, float] = field(default_factory=dict)
    """Error of torch's own norm of weight, grad and update."""


@dataclass(frozen=True)
class AnswerCheck:
    """The result of checking one answer."""

    problems: tuple[str, ...] = ()
    """What is wrong, one phrase each; empty when the answer is right."""
    estimates: int = 0
    """Sampled norms that were compared with their standard error."""
    far_off: int = 0
    """Of those, how many were off by more than FAR_ERRORS standard errors."""

    @property
    def wrong(self) -> str | None:
        """What is wrong in one sentence; None when the answer is right."""
        if not self.problems:
            return None
        first, *others = self.problems
        return f"{first} (and {len(others)} more)" if others else first


class TruthSession(Session):
    """Wraps a session and computes the truth before and after the optimizer step."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._session = session
        self._parameters = dict(trainable_parameters(model))
        self._before: dict[str, torch.Tensor] = {}
        self.truth: dict[str, Truth] = {}

    def enable(self) -> None:
        self._session.enable()

    def before_step(self) -> None:
        self._before = {n: full(p).clone() for n, p in self._parameters.items()}
        self._session.before_step()

    def after_step(self, loss: torch.Tensor) -> None:
        self._session.after_step(loss)
        self.truth = {name: self._truth_of(name, p) for name, p in self._parameters.items()}
        self._before = {}

    def disable(self) -> None:
        self._session.disable()

    def _truth_of(self, name: str, parameter: nn.Parameter) -> Truth:
        weight, before = full(parameter), self._before[name]
        found = {"weight": norm(weight), "update": norm(weight, before)}
        by_torch = {"weight": weight.norm(), "update": (weight - before).norm()}
        if parameter.grad is not None:
            grad = full(parameter.grad)
            found["grad"], by_torch["grad"] = norm(grad), grad.norm()
        off = {what: abs(float(by_torch[what]) - value) for what, value in found.items()}
        return Truth(found["weight"], found.get("grad"), found["update"], off)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, also when ranks hold shards of it. A collective then."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def norm(tensor: torch.Tensor, less: torch.Tensor | None = None) -> float:
    """Return the norm of a tensor, or of its difference from another, in float64."""
    flat, other = tensor.reshape(-1), None if less is None else less.reshape(-1)
    total = 0.0
    for begin in range(0, flat.numel(), CHUNK):
        wide = flat[begin : begin + CHUNK].double()
        if other is not None:
            wide = wide - other[begin : begin + CHUNK].double()
        total += float(wide.square().sum())
    return math.sqrt(total)


def check_answer(
    finds: Sequence[str], answer: Answer, truth: Mapping[str, Truth], rounding: float
) -> AnswerCheck:
    """Compare an answer with the truth.

    `finds`: which of weight, grad and update it has to report for every parameter.
    """
    problems: list[str] = []
    estimates = far_off = 0
    for what in finds:
        checks = {
            name: _check_norm(what, name, answer.get(name, Norms()), right, rounding)
            for name, right in truth.items()
        }
        problems += [each for each in checks.values() if isinstance(each, str)]
        sampled = [each for each in checks.values() if isinstance(each, _Estimate)]
        problems += _check_estimates(what, sampled)
        if any(_is_sampled(what, each) for each in answer.values()):
            problems += _check_total(what, answer, truth, rounding)
        estimates += len(sampled)
        far_off += sum(each.errors > FAR_ERRORS for each in sampled)
    return AnswerCheck(tuple(problems), estimates, far_off)


@dataclass(frozen=True)
class _Estimate:
    """A sampled norm that is not grossly wrong."""

    errors: float
    """How many standard errors it is off."""
    share: float
    """Its standard error as a share of the norm."""


def _is_sampled(what: str, reported: Norms) -> bool:
    return bool(getattr(reported, f"{what}_error") > 0 and not reported.certain)


def _check_norm(
    what: str, name: str, reported: Norms, truth: Truth, rounding: float
) -> _Estimate | str | None:
    """Return a sampled norm for the check of all, or a problem; None for an exact one."""
    expected: float | None = getattr(truth, what)
    value: float | None = getattr(reported, what)
    if expected is None or value is None:
        if value == expected or value == 0:
            return None
        return f"the {what} norm of {name} is {expected}, not {value}"
    error: float = getattr(reported, f"{what}_error")
    sampled = _is_sampled(what, reported)
    allowed = rounding * expected + AS_TORCH * truth.torch_off.get(what, 0.0)
    if what == "weight":  # it may have been read before the step
        allowed += truth.update
    beyond = abs(value - expected) - allowed
    limit = max(GROSS_ERRORS * error, GROSS_SHARE * expected) if sampled else error
    if not beyond <= limit:
        stated = f" with an error of {error:.3g}" if error else ""
        return f"the {what} norm of {name} is {expected:.6g}, not {value:.6g}{stated}"
    return _Estimate(beyond / error, error / expected if expected else 0.0) if sampled else None


def _check_estimates(what: str, sampled: Sequence[_Estimate]) -> list[str]:
    """Check whether the standard errors are right and small enough, over all parameters."""
    if not sampled:
        return []
    problems = []
    typical = median(each.errors for each in sampled)
    share = median(each.share for each in sampled)
    far = sum(each.errors > FAR_ERRORS for each in sampled)
    if typical > TYPICAL_ERRORS:
        problems.append(f"{what} norms are typically {typical:.1f} standard errors off")
    if far > max(1, FAR_SHARE * len(sampled)):
        many = f"{far} of {len(sampled)} {what} norms"
        problems.append(f"{many} are more than {FAR_ERRORS:g} standard errors off")
    if share > USEFUL:
        problems.append(f"{what} norms have a standard error of {share:.0%}, typically")
    return problems


def _check_total(
    what: str, answer: Answer, truth: Mapping[str, Truth], rounding: float
) -> list[str]:
    """Check the norm over all parameters: most of it may lie in a few of them."""
    reported = {name: answer.get(name, Norms()) for name in truth}
    norms = {name: getattr(each, what) or 0.0 for name, each in reported.items()}
    errors = [norms[name] * getattr(each, f"{what}_error") for name, each in reported.items()]
    value = math.hypot(*norms.values())
    expected = math.hypot(*((getattr(each, what) or 0.0) for each in truth.values()))
    error = math.hypot(*errors) / value if value else 0.0
    allowed = rounding * expected
    allowed += AS_TORCH * math.hypot(*(each.torch_off.get(what, 0.0) for each in truth.values()))
    if what == "weight":
        allowed += math.hypot(*(each.update for each in truth.values()))
    if abs(value - expected) - allowed <= FAR_ERRORS * error:
        return []
    stated = f"{value:.6g} with an error of {error:.3g}"
    return [f"the total {what} norm is {expected:.6g}, not {stated}"]
