"""Weights & Biases, online or offline."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any, Final

from distmon.config import WandbConfig
from distmon.errors import ConfigError
from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks.base import SinkContext
from distmon.sinks.notify import body
from distmon.sinks.tags import param_histograms, param_scalars, scalars_by_step

STEP_TAG: Final = "train/step"
PREFIX: Final = "distmon/"
"""Before every name in the trainer's own run."""
LEVELS: Final = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}


def open_sink(context: SinkContext) -> WandbSink:
    """Return the sink of a monitor."""
    return WandbSink(context.folder, context.config.wandb, context.tagged_params)


class WandbSink:
    """Logs to the trainer's active wandb run, or to one of its own for each run folder.

    In a run of its own, later attempts resume it by the id in `run.json`. In the trainer's run all
    names begin with `distmon/` and have an axis of their own, and nothing advances wandb's step:
    the values are added to the row that the trainer logs next.
    """

    def __init__(self, folder: RunFolder, settings: WandbConfig, selected: frozenset[str]) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "the sink \"wandb\" needs a package: pip install 'distmon[wandb]'"
            ) from None
        self._wandb: Any = wandb
        self._selected = selected
        self._joined = wandb.run is not None
        if self._joined:
            self._run: Any = self._wandb.run
            self._run.define_metric(f"{PREFIX}*", step_metric=PREFIX + STEP_TAG)
            self._run.config.update({"distmon": run_config(folder)}, allow_val_change=True)
        else:
            self._open_run(folder, settings)

    def _open_run(self, folder: RunFolder, settings: WandbConfig) -> None:
        wandb = self._wandb
        run_id = folder.wandb_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=settings.project,
            name=settings.name or folder.path.resolve().name,
            tags=list(settings.tags) or None,
            mode=settings.mode,
            dir=str(folder.path),
            id=run_id,
            resume="allow",
            config=run_config(folder),
            allow_val_change=True,
            # One that the trainer begins later is not changed, and neither is its output.
            reinit="create_new",
            settings=wandb.Settings(console="off", login_timeout=30),
        )
        if folder.wandb_id is None:
            folder.keep_wandb_id(run_id)
        # wandb's own step only increases; this metric lets a resumed attempt repeat earlier steps.
        self._run.define_metric(STEP_TAG)
        self._run.define_metric("*", step_metric=STEP_TAG)

    def record(self, record: Record) -> None:
        if self._joined:
            values = self._at_record(record, scalars_by_step(record)[record.step])
            self._run.log({PREFIX + tag: value for tag, value in values.items()}, commit=False)
            return
        for step, scalars in scalars_by_step(record).items():
            last = step == record.step
            self._run.log(self._at_record(record, scalars) if last else {STEP_TAG: step, **scalars})

    def _at_record(self, record: Record, scalars: Mapping[str, float]) -> dict[str, Any]:
        """Return the values at the step of the record, those of parameters included."""
        values: dict[str, Any] = {STEP_TAG: record.step, **scalars}
        values.update(param_scalars(record.params, self._selected))
        for tag, bins in param_histograms(record.params, self._selected).items():
            values[tag] = self._wandb.Histogram(
                np_histogram=(bins.counts.tolist(), bins.edges.tolist())
            )
        return values

    def alert(self, alert: Alert) -> None:
        self._run.alert(
            title=f"{alert.rule} at step {alert.step}",
            text=body(alert),
            level=LEVELS[alert.severity],
            wait_duration=0,
        )

    def close(self) -> None:
        if not self._joined:
            self._run.finish()


def run_config(folder: RunFolder) -> dict[str, Any]:
    """Return the run's config for wandb: the monitor's, plus the size of model and job."""
    table = folder.parameters
    sizes = [math.prod(row.get("shape", ())) for row in table]
    trainable = [
        size for size, row in zip(sizes, table, strict=True) if row.get("requires_grad", True)
    ]
    return {
        **folder.config,
        "parameter_tensors": len(table),
        "parameters": sum(sizes),
        "parameters_trainable": sum(trainable),
        "world_size": folder.world_size,
        "attempt": folder.attempt,
        "versions": folder.versions,
    }
