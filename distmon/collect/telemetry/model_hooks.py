"""The hooks on whole models, installed while something is measured in the coming step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from torch import nn

from distmon.collect.gradient_gain.in_graph import something_was_compiled
from distmon.collect.own_hooks import KeptHook, OwnerMark, Removable, SwitchedHooks
from distmon.collect.telemetry.loader_hooks import LoaderHook
from distmon.collect.telemetry.phase_hooks import install_phase_marks, last_gradient_of
from distmon.collect.telemetry.rank_telemetry import RankTelemetry
from distmon.native import NativeModule


def install_telemetry_hooks(
    models: Sequence[nn.Module],
    telemetry: RankTelemetry,
    owner: object,
    native: NativeModule | None = None,
) -> Iterator[Removable]:
    """Install the hooks of phases, signals and data loaders; yield what removes each of them.

    `owner` is the monitor that they belong to; `native` switches hooks faster. Holds the models by
    weak references.
    """
    clock, signals = telemetry.phases, telemetry.signals
    for model in models:
        yield OwnerMark(model, owner)
    lasts = [(weakref.ref(model), last_gradient_of(model, clock)) for model in models]
    del models
    yield from (last for _, last in lasts if last is not None)

    def marks() -> Iterator[KeptHook]:
        for reference, last in lasts:
            if (model := reference()) is not None:
                yield from install_phase_marks(model, clock, last)

    def forwards() -> Iterator[KeptHook]:
        for reference, _ in lasts:
            if (model := reference()) is not None and signals is not None:
                hook = signals.forward_hook
                yield KeptHook(model.register_forward_pre_hook(hook, with_kwargs=True))

    phases = SwitchedHooks(marks, _are_removable, native)
    yield phases
    clock.switch_hooks = phases.switch
    if signals is not None:
        inputs = SwitchedHooks(forwards, _are_removable, native)
        yield inputs
        signals.switch_hooks = inputs.switch
    yield LoaderHook(clock)


def _are_removable() -> bool:
    """Return whether no compiled graph may have been traced with the hooks."""
    return not something_was_compiled()
