"""Nobody watches: the bare training step."""

from __future__ import annotations

from typing import Final

from distmon_benchmarks.contenders.contender import Contender, Session

NONE: Final = Contender(
    name="none",
    description="the bare training step",
    timing="whole step",
    begin=lambda _: Session(),
)
