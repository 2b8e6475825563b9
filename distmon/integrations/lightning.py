"""`DistmonCallback` for the `Trainer` of Lightning.

    trainer = lightning.Trainer(..., callbacks=[DistmonCallback(interval=100)])

Steps, losses, gradient norms and evaluations come from the trainer, and the monitor's state goes
into its checkpoints; nothing else has to be called.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from distmon.attach import attach
from distmon.errors import ConfigError
from distmon.integrations.auto.following import Following
from distmon.integrations.auto.step_report import StepReport
from distmon.monitor import Monitor
from distmon.runtime.actions import TrainingStopped

log = logging.getLogger("distmon")


def _callback_class() -> Any:
    for package in ("lightning", "pytorch_lightning"):
        if find_spec(package) is not None:
            name = "lightning.pytorch" if package == "lightning" else package
            return import_module(name).Callback
    raise ConfigError("this callback needs lightning: pip install 'distmon[lightning]'")


class DistmonCallback(_callback_class()):  # type: ignore[misc]
    """Attaches a monitor when `fit` begins to train, and closes it at the end.

    Takes the arguments of `distmon.attach` after the optimizer. `val_loss` is the name under which
    the module logs its validation loss. `monitor` is the monitor, from the beginning of `fit` on.
    """

    def __init__(self, config: Any = None, *, val_loss: str = "val_loss", **options: Any) -> None:
        super().__init__()
        self.monitor: Monitor | None = None
        self._config = config
        self._val_loss = val_loss
        self._options = options
        self._report: StepReport | None = None
        self._completed = 0
        self._saved: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Attach to the model as the strategy has wrapped it, and to all optimizers."""
        options = dict(self._options)
        if trainer.max_steps is not None and trainer.max_steps > 0:
            options.setdefault("total_steps", trainer.max_steps)
        optimizers = [*trainer.optimizers]
        monitor = attach(trainer.strategy.model, optimizers, self._config, **options)
        if not isinstance(monitor, Monitor):
            return
        self.monitor = monitor
        self._completed = trainer.global_step
        self._report = StepReport(monitor, optimizers)
        Following(self._report)
        if self._saved:
            monitor.load_state_dict(self._saved)

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin the forward pass: `training_step` is not a call of the module."""
        self._enter("forward")

    def on_before_backward(self, *_: Any) -> None:
        """Begin the backward pass."""
        self._enter("backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Begin the step of an optimizer, whose hook ran before the forward pass."""
        self._enter("optimizer")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Complete a step of the monitor, if an optimizer has stepped."""
        if self._report is None or trainer.global_step == self._completed:
            return
        self._completed = trainer.global_step
        # Lightning counts the steps of all optimizers.
        step = trainer.global_step if len(self._report.optimizers) == 1 else None
        try:
            self._report.complete(step=step)
        except TrainingStopped as stopped:
            log.warning("distmon: %s", stopped)
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        """Report the validation loss."""
        loss = trainer.callback_metrics.get(self._val_loss)
        if self.monitor is not None and loss is not None and not trainer.sanity_checking:
            self.monitor.evaluated(val_loss=loss, epoch=trainer.current_epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor, for a checkpoint."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the monitor is attached."""
        self._saved = state_dict

    def on_train_end(self, *_: Any) -> None:
        """Deliver what is pending, and print the summary."""
        self._close()

    def on_exception(self, *_: Any) -> None:
        """Deliver what is pending."""
        self._close()

    def _enter(self, phase: str) -> None:
        if self.monitor is not None:
            self.monitor.parts.telemetry.phases.enter(phase)

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
        self._report = None
