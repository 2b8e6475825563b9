"""`DistmonCallback` for the `Trainer` of Hugging Face transformers.

    trainer = Trainer(..., callbacks=[DistmonCallback(interval=100)])

Steps, losses, gradient norms and evaluations come from the trainer; nothing else has to be called.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Final

from distmon.attach import attach
from distmon.errors import ConfigError
from distmon.integrations.auto.following import Following
from distmon.integrations.auto.step_report import StepReport
from distmon.monitor import Monitor
from distmon.runtime.actions import TrainingStopped

try:
    from transformers import TrainerCallback
except ImportError:
    raise ConfigError("this callback needs transformers: pip install 'distmon[hf]'") from None

log = logging.getLogger("distmon")
STATE_FILE: Final = "distmon.json"
"""The monitor's state, in each checkpoint folder of the trainer."""


class DistmonCallback(TrainerCallback):
    """Attaches a monitor when training begins, and closes it when training ends.

    Takes the arguments of `distmon.attach` after the optimizer. `monitor` is the monitor, from the
    beginning of the training on.
    """

    def __init__(self, config: Any = None, **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._config = config
        self._options = options
        self._report: StepReport | None = None
        self._tokens = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Attach to the trainer's model and optimizer."""
        self._close()
        optimizer = kwargs["optimizer"]
        options = {"total_steps": state.max_steps, **self._options}
        monitor = attach(kwargs["model"], optimizer, self._config, **options)
        if not isinstance(monitor, Monitor):
            return
        self.monitor = monitor
        self._tokens = float(state.num_input_tokens_seen)
        self._report = StepReport(monitor, [optimizer])
        Following(self._report)
        saved = _checkpoint(args, state) / STATE_FILE
        if state.global_step and saved.exists():
            monitor.load_state_dict(json.loads(saved.read_text()))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Complete a step of the monitor."""
        if self._report is None:
            return
        seen = float(state.num_input_tokens_seen)
        tokens, self._tokens = (seen - self._tokens) / max(1, args.world_size), seen
        try:
            self._report.complete(step=state.global_step, tokens=tokens or None)
        except TrainingStopped as stopped:
            log.warning("distmon: %s", stopped)
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Report the validation loss."""
        loss = (kwargs.get("metrics") or {}).get("eval_loss")
        if self.monitor is not None and loss is not None:
            self.monitor.evaluated(val_loss=loss, epoch=state.epoch)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Save the state of the monitor with the checkpoint."""
        if self.monitor is None or not state.is_world_process_zero:
            return
        folder = _checkpoint(args, state)
        if folder.is_dir():
            text = json.dumps(self.monitor.state_dict())
            self.monitor.faults.guard("state", lambda: (folder / STATE_FILE).write_text(text))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Deliver what is pending, and print the summary."""
        self._close()

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
        self._report = None


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
