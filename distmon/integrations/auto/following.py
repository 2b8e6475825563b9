"""Follow the loop of a monitor that was attached to known optimizers."""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle

from distmon.integrations.auto.loop_signals import LoopSignals
from distmon.integrations.auto.step_report import StepReport


class Following:
    """Passes what happens in the loop to a `StepReport`, until `remove` or the monitor closes."""

    def __init__(self, report: StepReport) -> None:
        """Call it after the monitor has installed its own hooks."""
        self._signals = LoopSignals(report)
        self._hooks: list[RemovableHandle] = []
        for optimizer in report.optimizers:
            begins, ends = _Call(report.optimizer_begins), _Call(report.optimizer_stepped)
            hook = optimizer.register_step_pre_hook(begins)
            hooks: Any = optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(hook.id, last=False)
            self._hooks.append(hook)
            self._hooks.append(optimizer.register_step_post_hook(ends))
        self._signals.begin()
        report.monitor.remove_at_close(self)

    def remove(self) -> None:
        """Remove the hooks and restore what was replaced. Safe to call twice."""
        self._signals.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Call:
    """A step hook that passes on the optimizer only."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, optimizer: Any, *_: Any) -> None:
        self._function(optimizer)
