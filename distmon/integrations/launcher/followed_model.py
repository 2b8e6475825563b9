"""A model that the launcher has attached to: where its steps begin, and where it is written."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distmon.errors import RunFolderError
from distmon.integrations.auto.step_report import AutoStep
from distmon.integrations.launcher.model_search import trained_by
from distmon.layout.capture import unwrap
from distmon.monitor import Monitor
from distmon.runs.run_names import new_run_path, run_path_of_model


@dataclass(frozen=True)
class Start:
    """Where the steps of a monitor begin; that of rank 0 counts on every rank."""

    completed: int = 0
    """Steps that the training had completed before."""
    state: dict[str, Any] = field(default_factory=dict)
    """State of the monitor that this one continues; empty for the first one of a model."""

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps({"completed": self.completed, "state": self.state})

    @classmethod
    def from_json(cls, text: str) -> Start:
        """Return what `to_json` has written."""
        return cls(**json.loads(text))

    def begin(self, monitor: Monitor, optimizers: Sequence[torch.optim.Optimizer]) -> AutoStep:
        """Return what completes the steps of `monitor`, numbered from here on."""
        if self.state:
            monitor.load_state_dict(self.state)
        return AutoStep(monitor, optimizers, self.completed if self.completed > 0 else None)


class FollowedModel:
    """A model with a monitor; leaves the list that it is in when the monitor closes."""

    def __init__(
        self, root: nn.Module, step: AutoStep, folder: Path | None, members: list[FollowedModel]
    ) -> None:
        self.step = step
        self.folder = folder
        self._inner = weakref.ref(unwrap(root))
        self._members = members
        step.monitor.remove_at_close(self)

    def is_of(self, root: nn.Module) -> bool:
        """Return whether `root` is this model, maybe in another wrapper."""
        return self._inner() is unwrap(root)

    def end(self) -> Start:
        """Close the monitor; return where another one continues."""
        state = self.step.monitor.state_dict()
        self.close()
        return Start(state=state)

    def still_needed(self, newer: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Return the optimizers that train something which none of the `newer` ones does."""
        taken = set().union(*map(trained_by, newer))
        return [each for each in self.step.optimizers if not trained_by(each) <= taken]

    def close(self) -> None:
        """Close the monitor."""
        self.step.monitor.close()

    def remove(self) -> None:
        """Forget the model, whose monitor closes."""
        if self in self._members:
            self._members.remove(self)


class RunFolders:
    """Names of run folders: that of the first model, then `-model2` and so on."""

    def __init__(self, first: Path | None) -> None:
        """`first`: as the user has named it; None for a name of its own."""
        self._first = first
        self._count = 0

    def new(self) -> Path | None:
        """Return the next folder; None on other ranks than 0, which write none."""
        self._count += 1
        if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
            return None
        if self._first is None:
            with suppress(RunFolderError):  # `attach` then finds another place, and says so
                self._first = new_run_path()
        if self._count == 1 or self._first is None:
            return self._first
        return run_path_of_model(self._first, self._count)


def steps_taken(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return how many steps optimizers have taken, as those of the Adam family know; 0 for others.

    After a checkpoint was loaded it is the number of the step that the training resumes from.
    """
    taken = 0
    for optimizer in optimizers:
        for state in optimizer.state.values():
            count = state.get("step", 0) if isinstance(state, dict) else 0
            if isinstance(count, torch.Tensor):
                count = count.item() if count.numel() == 1 else 0
            if isinstance(count, int | float):
                taken = max(taken, int(count))
    return taken


def has_monitor(optimizer: Any) -> bool:
    """Return whether the script has attached a monitor itself."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    # A compiled hook is a method of a type of the native module and has no module of its own.
    homes = [
        (getattr(h, "__module__", ""), type(getattr(h, "__self__", h)).__module__) for h in hooks
    ]
    return any(str(home).startswith("distmon") for pair in homes for home in pair)
