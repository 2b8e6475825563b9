"""No speed number for a wrong answer: what a contender says is held against the plain truth.

The truth is computed in float64 from copies of all weights and gradients. A contender that reads
every element may be as far off as torch's own norm of that tensor. One that samples says how far it
may be off: typical estimates have to be within that, nearly all within a few times that, and none
may be grossly wrong.

With one exception: when nearly everything lies in very few rows, as in the gradient of an embedding
after a short text, a sample sees nothing of it and cannot know. What was not judged because of it,
and how many estimates are far off, is told with the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distmon_benchmarks.contenders import Norms, Session
from distmon_benchmarks.contenders.contender import Answer, named_parameters

ROUNDING: Final[Mapping[torch.dtype, float]] = {torch.float32: 1e-4, torch.bfloat16: 2.0**-8}
"""How far a norm may be off in any case, relatively: torch rounds that of a bfloat16 tensor to
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
"""A standard error that is typically above this share of the norm says nothing."""
FEW_ROWS: Final = 0.01
"""When this share of the rows holds more than half of the squares, a sample may miss them."""
PIECE: Final = 2**22
"""Elements that are widened to float64 at a time."""


@dataclass(frozen=True)
class Truth:
    """About one parameter in one step."""

    weight: float
    grad: float | None
    update: float
    in_few_rows: frozenset[str] = frozenset()
    """Of grad and update, what a sample may not see."""
    torch_off: Mapping[str, float] = field(default_factory=dict)
    """How far torch's own norm of weight, grad and update is off."""


@dataclass(frozen=True)
class Verdict:
    """About an answer."""

    problem: str | None
    """What is wrong, in one sentence; None when nothing is."""
    not_judged: tuple[str, ...] = ()
    """What was sampled and may not be seen by a sample, such as `grad of wte.weight`."""
    judged: int = 0
    """Estimates that were held against their standard error."""
    far_off: int = 0
    """Of those, how many were off by more than FAR_ERRORS of it."""


class Referee(Session):
    """Plays the part of a session and notes the truth before and after the optimizer's step."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._session = session
        self._parameters = dict(named_parameters(model))
        self._before: dict[str, torch.Tensor] = {}
        self.truth: dict[str, Truth] = {}

    def wake(self) -> None:
        self._session.wake()

    def before_step(self) -> None:
        self._before = {n: whole(p).clone() for n, p in self._parameters.items()}
        self._session.before_step()

    def after_step(self, loss: torch.Tensor) -> None:
        self._session.after_step(loss)
        self.truth = {name: self._of(name, p) for name, p in self._parameters.items()}
        self._before = {}

    def _of(self, name: str, parameter: nn.Parameter) -> Truth:
        weight, before = whole(parameter), self._before[name]
        update = weight - before
        grad = None if parameter.grad is None else whole(parameter.grad)
        found = {"weight": norm(weight), "update": norm(weight, before)}
        off = {
            "weight": abs(float(weight.norm()) - found["weight"]),
            "update": abs(float(update.norm()) - found["update"]),
        }
        hidden = {"update"} if in_few_rows(update) else set()
        if grad is not None:
            found["grad"] = norm(grad)
            off["grad"] = abs(float(grad.norm()) - found["grad"])
            if in_few_rows(grad):
                hidden.add("grad")
        return Truth(found["weight"], found.get("grad"), found["update"], frozenset(hidden), off)

    def sleep(self) -> None:
        self._session.sleep()


def in_few_rows(tensor: torch.Tensor) -> bool:
    """Whether most of its squares lie in a few of its rows."""
    count = int(FEW_ROWS * len(tensor)) if tensor.dim() > 1 else 0
    if count == 0:
        return False
    rows = torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=torch.float32).square()
    return bool(rows.topk(count).values.sum() > rows.sum() / 2)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, also when ranks hold parts of it. Every rank has to ask."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm(tensor: torch.Tensor, less: torch.Tensor | None = None) -> float:
    """The norm of a tensor, or of its difference to another, in float64."""
    total = 0.0
    others = None if less is None else less.reshape(-1).split(PIECE)
    for i, piece in enumerate(tensor.reshape(-1).split(PIECE)):
        wide = piece.double()
        if others is not None:
            wide = wide - others[i].double()
        total += float(wide.square().sum())
    return total**0.5


def judge(
    finds: tuple[str, ...], answer: Answer, truth: Mapping[str, Truth], rounding: float
) -> Verdict:
    """Whether an answer is right.

    `finds`: which of weight, grad and update it is to name for every parameter.
    """
    not_judged: list[str] = []
    judged = far_off = 0
    for what in finds:
        errors: list[float] = []
        shares: list[float] = []
        for name, right in truth.items():
            expected: float | None = getattr(right, what)
            told = answer.get(name, Norms())
            said: float | None = getattr(told, what)
            if expected is None or said is None:
                if said != expected and said != 0:
                    return Verdict(f"the {what} norm of {name} is {expected}, not {said}")
                continue
            error: float = getattr(told, f"{what}_error")
            sampled = error > 0 and not told.certain
            if sampled and what in right.in_few_rows:
                not_judged.append(f"{what} of {name}")
                continue
            allowed = rounding * expected + AS_TORCH * right.torch_off.get(what, 0.0)
            if what == "weight":  # it may have looked before the step
                allowed += right.update
            beyond = abs(said - expected) - allowed
            limit = max(GROSS_ERRORS * error, GROSS_SHARE * expected) if sampled else error
            if beyond > limit:
                stated = f" with an error of {error:.3g}" if error else ""
                sentence = f"the {what} norm of {name} is {expected:.6g}, not {said:.6g}{stated}"
                return Verdict(sentence)
            if sampled:
                errors.append(beyond / error)
                shares.append(error / expected if expected else 0.0)
        if not errors:
            continue
        far = sum(each > FAR_ERRORS for each in errors)
        if median(errors) > TYPICAL_ERRORS:
            return Verdict(f"{what} norms are typically {median(errors):.1f} standard errors off")
        if far > max(1, FAR_SHARE * len(errors)):
            many = f"{far} of {len(errors)} {what} norms"
            return Verdict(f"{many} are more than {FAR_ERRORS:g} standard errors off")
        if median(shares) > USEFUL:
            return Verdict(f"{what} norms have a standard error of {median(shares):.0%}, typically")
        judged, far_off = judged + len(errors), far_off + far
    return Verdict(None, tuple(not_judged), judged, far_off)
