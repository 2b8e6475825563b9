"""The monitor of a run without monitoring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from distmon.collect.own_hooks import Removable


class DisabledMonitor:
    """Null object with the protocol of `distmon.Monitor`: every call returns at once."""

    enabled = False
    closed = True
    """Nothing is observed."""

    @property
    def last_record(self) -> None:
        """Always None."""
        return

    def install_hooks(self) -> None: ...

    def install_model_hooks(self, models: Iterable[torch.nn.Module]) -> None: ...

    def remove_at_close(self, hook: Removable) -> None: ...

    def before_step(self, optimizer: torch.optim.Optimizer | None = None) -> None: ...

    def after_step(self, optimizer: torch.optim.Optimizer | None = None) -> None: ...

    def check(self, *, loss: Any = None, grad_norm: Any = None) -> None: ...

    def step(
        self,
        *,
        loss: Any = None,
        tokens: Any = None,
        samples: Any = None,
        lr: Any = None,
        grad_norm: Any = None,
        step: Any = None,
    ) -> None: ...

    def evaluated(self, *, val_loss: Any, train_loss: Any = None, epoch: Any = None) -> None: ...

    def task_losses(self, losses: Mapping[str, torch.Tensor]) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def plot(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
