"""The floating-point operations of a model's training step, and their source."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward; a multiply-add counts as two."""

    value: float
    """FLOPs per token, or per optimizer step of the whole job."""
    description: str
    """What was counted and how, such as `6N + attention by formula`."""
    causal: bool | None
    """Whether attention counts half because of the causal mask; None when unknown."""
    per: Literal["token", "step"] = "token"

    def __post_init__(self) -> None:
        if not (isfinite(self.value) and self.value > 0):
            raise MfuUnavailableError(
                f"the FLOPs per {self.per} must be a positive number, not {self.value}"
            )


def given_flops(value: float, per: Literal["token", "step"] = "token") -> ModelFlops:
    """Return the user's own number; "step" is one optimizer step of all devices together."""
    return ModelFlops(value, "FLOPs given by the user", causal=None, per=per)
