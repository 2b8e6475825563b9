"""`attach` and a tracker for a loop with Hugging Face accelerate.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = distmon.integrations.accelerate.attach(accelerator)

or

    accelerator = Accelerator(log_with=DistmonTracker())

Steps, losses and gradient norms are taken from the loop; nothing else has to be called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from distmon.attach import attach as attach_to
from distmon.config import load_config
from distmon.errors import ConfigError, LayoutError
from distmon.integrations.auto.following import Following
from distmon.integrations.auto.step_report import AutoStep
from distmon.integrations.launcher.training_watch import TrainingWatch
from distmon.monitor import Monitor
from distmon.runtime.disabled import DisabledMonitor

try:
    from accelerate.tracking import GeneralTracker
except ImportError:
    raise ConfigError("this integration needs accelerate: pip install 'distmon[hf]'") from None

VAL_LOSSES: Final = ("val_loss", "eval_loss", "val/loss", "eval/loss", "validation_loss")
"""Names under which a validation loss is usually logged."""


def attach(
    accelerator: Any,
    model: Any = None,
    optimizer: Any = None,
    config: Any = None,
    **options: Any,
) -> Monitor | DisabledMonitor:
    """Monitor what `accelerator.prepare` has prepared. Call it on every rank, after `prepare`.

    `model` and `optimizer` choose among several. `config` and `options` are those of
    `distmon.attach`. The returned monitor completes its steps by itself; `close()` it at the end.
    """
    models = [*accelerator._models] if model is None else [model]
    optimizers = [*accelerator._optimizers] if optimizer is None else [optimizer]
    if len(models) != 1 or not optimizers:
        raise LayoutError(
            f"the accelerator has prepared {len(models)} models and {len(optimizers)} optimizers; "
            "pass the model and the optimizer to attach"
        )
    monitor = attach_to(models[0], optimizers, config, **options)
    if isinstance(monitor, Monitor):
        Following(AutoStep(monitor, optimizers))
    return monitor


class DistmonTracker(GeneralTracker):  # type: ignore[misc]
    """Tracker for `Accelerator(log_with=DistmonTracker())`; nothing else has to be called.

    Finds model, optimizers, losses and steps as `distmon run` does. From `accelerator.log` it takes
    the validation loss, by any of the names in `val_loss`; `end_training` closes the monitor.
    """

    name = "distmon"
    requires_logging_directory = False

    def __init__(
        self, config: Any = None, *, val_loss: Sequence[str] = VAL_LOSSES, **options: Any
    ) -> None:
        """Create it on every rank, before the optimizer; takes the settings of `distmon.attach`."""
        super().__init__()
        console = options.pop("console", None)
        self._val_loss = val_loss
        self._watch = TrainingWatch(load_config(config, options), console)
        self._watch.begin()

    @property
    def tracker(self) -> Monitor | None:
        """The monitor, from the first training step on."""
        monitors = self._watch.monitors
        return monitors[0] if monitors else None

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:  # noqa: ARG002
        """Report a validation loss; accelerate calls it on the main process only."""
        monitor = self.tracker
        for name in self._val_loss:
            if monitor is not None and name in values:
                monitor.evaluated(val_loss=values[name], epoch=values.get("epoch"))
                return

    def finish(self) -> None:
        """Deliver what is pending, and print the summary."""
        self._watch.close()
