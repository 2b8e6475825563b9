"""The hooks of a monitor on the optimizers and modules of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
        before: Callable[..., None],
        after: Callable[..., None],
    ) -> None:
        """Let the optimizers call `before` and `after` their steps; neither is traced."""
        for optimizer in optimizers:
            self.add(optimizer.register_step_pre_hook(before))
            self.add(optimizer.register_step_post_hook(after))

    def install_on_models(
        self, models: Sequence[torch.nn.Module], parts: Parts, owner: object
    ) -> None:
        """Let the calls of the blocks and of the whole model be observed for `owner`, a monitor."""
        parts.cycle.observer.gain.install()
        parts.cycle.observer.inside.install()
        for hook in install_telemetry_hooks(models, parts.telemetry, owner):
            self.add(hook)  # one by one: the next one may raise

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._installed:
            hook.remove()
        self._installed = []
