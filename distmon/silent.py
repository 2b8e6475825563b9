"""The monitor that is switched off."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from distmon.monitor import Monitor


class SilentMonitor(Monitor):
    """What `attach` returns when monitoring is switched off: every call does nothing."""

    def __init__(self) -> None:
        pass

    @property
    def last_record(self) -> None:
        """There is none."""

    def before_step(self, optimizer: torch.optim.Optimizer | None = None) -> None: ...

    def after_step(self, optimizer: torch.optim.Optimizer | None = None) -> None: ...

    def check(self, **_: Any) -> None: ...

    def step(self, **_: Any) -> None: ...

    def evaluated(self, **_: Any) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def task_losses(self, losses: Mapping[str, torch.Tensor]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...
