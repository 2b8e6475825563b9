"""Composer's OptimizerMonitor: the norm of every gradient, logged by Composer's own logger.

Composer's trainer would call it; here its public parts are used without the trainer, so that it
observes the same training step as all others.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from distmon.bench.contender import (
    Answer,
    Contender,
    Norms,
    Observed,
    Session,
    trainable_parameters,
)


class CallbackSession(Session):
    """The callback, called where Composer's trainer ends a batch."""

    def __init__(self, observed: Observed) -> None:
        from composer.callbacks import OptimizerMonitor
        from composer.core import State
        from composer.devices import DeviceCPU, DeviceGPU
        from composer.loggers import InMemoryLogger, Logger

        model = observed.model
        on_gpu = next(model.parameters()).is_cuda
        self._names = [name for name, _ in trainable_parameters(model)]
        self._state: Any = State(
            model=model,
            rank_zero_seed=0,
            run_name="benchmark",
            device=DeviceGPU() if on_gpu else DeviceCPU(),
            optimizers=observed.optimizer,
        )
        self._memory: Any = InMemoryLogger()
        self._logger: Any = Logger(self._state, destinations=[self._memory])
        self._callback: Any = OptimizerMonitor(batch_log_interval=1)

    def after_step(self, loss: torch.Tensor) -> None:
        self._callback.batch_end(self._state, self._logger)

    def answer(self) -> Answer:
        newest = self._memory.most_recent_values
        return {
            name: Norms(
                grad=float(newest[tag]) if (tag := f"l2_norm/grad/{name}") in newest else None
            )
            for name in self._names
        }


COMPOSER: Final = Contender(
    name="composer",
    description="Composer's OptimizerMonitor in every step, into its in-memory logger",
    timing="directly",
    begin=CallbackSession,
    finds=("grad",),
    in_growth=False,
    package="composer",
    install="pip install mosaicml",
)
