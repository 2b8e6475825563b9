"""All contenders, in the order in which tables list them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from distmon_benchmarks.contenders.composer_monitor import COMPOSER
from distmon_benchmarks.contenders.contender import Contender
from distmon_benchmarks.contenders.distmon_monitor import EXACT, SAMPLED
from distmon_benchmarks.contenders.foreach_norm import OF_BOTH, OF_GRADIENTS
from distmon_benchmarks.contenders.naive_clone import NAIVE_CLONE
from distmon_benchmarks.contenders.naive_hooks import NAIVE_HOOKS
from distmon_benchmarks.contenders.none import NONE
from distmon_benchmarks.contenders.olmo_style import OLMO_STYLE
from distmon_benchmarks.contenders.tensorboard_histograms import TENSORBOARD
from distmon_benchmarks.contenders.wandb_watch import WANDB_WATCH

CONTENDERS: Final[tuple[Contender, ...]] = (
    NONE,
    SAMPLED,
    EXACT,
    OF_GRADIENTS,
    OF_BOTH,
    NAIVE_CLONE,
    NAIVE_HOOKS,
    OLMO_STYLE,
    COMPOSER,
    TENSORBOARD,
    WANDB_WATCH,
)


def find(names: Iterable[str]) -> list[Contender]:
    """The contenders of these names, in the registry's order; a KeyError names unknown ones."""
    wanted = set(names)
    if unknown := wanted - {contender.name for contender in CONTENDERS}:
        raise KeyError(", ".join(sorted(unknown)))
    return [contender for contender in CONTENDERS if contender.name in wanted]
