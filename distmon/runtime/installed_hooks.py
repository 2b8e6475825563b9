"""The hooks of a monitor on the optimizers and modules of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from distmon.collect.own_hooks import Removable
from distmon.collect.telemetry.model_hooks import install_telemetry_hooks
from distmon.runtime.assembly import Parts


def untraced(call: Callable[..., None]) -> Callable[..., None]:
    """Return `call` so that a compiler does not trace into it.

    From the hooks of a compiled optimizer step it would, and recompile at every change of the
    monitor's state.
    """
    disable: Any = torch.compiler.disable
    untraced_call: Callable[..., None] = disable(call)
    return untraced_call


class StepHooks(Protocol):
    """What optimizers call around their steps: a monitor."""

    def before_step(self, optimizer: torch.optim.Optimizer | None) -> None: ...

    def after_step(self, optimizer: torch.optim.Optimizer | None) -> None: ...


class InstalledHooks:
    """Installs hooks, and removes them all at once. Used by the thread that attaches or closes."""

    def __init__(self) -> None:
        self._installed: list[Removable] = []

    def __len__(self) -> int:
        return len(self._installed)

    def add(self, hook: Removable) -> None:
        """Let `remove` remove it, too."""
        self._installed.append(hook)

    def install_on_optimizers(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        monitor: StepHooks,
        compiled: Mapping[str, Callable[..., None]],
    ) -> None:
        """Let the optimizers call the monitor, or its `compiled` entries; neither is traced."""
        calls = compiled or {
            "before_step": untraced(lambda optimizer, *_: monitor.before_step(optimizer)),
            "after_step": untraced(lambda optimizer, *_: monitor.after_step(optimizer)),
        }
        for optimizer in optimizers:
            self.add(optimizer.register_step_pre_hook(calls["before_step"]))
            self.add(optimizer.register_step_post_hook(calls["after_step"]))

    def install_on_models(
        self, models: Sequence[torch.nn.Module], parts: Parts, owner: object
    ) -> None:
        """Let the calls of the blocks and of the whole model be observed for `owner`, a monitor."""
        parts.cycle.observer.gain.install()
        parts.cycle.observer.inside.install()
        for hook in install_telemetry_hooks(models, parts.telemetry, owner, parts.native):
            self.add(hook)  # one by one: the next one may raise

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._installed:
            hook.remove()
        self._installed = []
