"""Weights & Biases, online or offline."""

from __future__ import annotations

import math
import secrets
from typing import Any, Final

from distmon.alert import Alert
from distmon.config import WandbConfig
from distmon.errors import ConfigError
from distmon.record import Record
from distmon.run_folder import RunFolder
from distmon.sinks.notify import body
from distmon.sinks.tags import param_histograms, param_scalars, scalars_by_step

STEP_TAG: Final = "train/step"
LEVELS: Final = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}


class WandbSink:
    """One wandb run per run folder; later attempts continue it under the id in `run.json`."""

    def __init__(self, folder: RunFolder, settings: WandbConfig, selected: frozenset[str]) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "the sink \"wandb\" needs a package: pip install 'distmon[wandb]'"
            ) from None
        self._wandb: Any = wandb
        self._selected = selected
        run_id = folder.wandb_id or secrets.token_hex(4)
        self._run: Any = wandb.init(
            project=settings.project,
            name=settings.name or folder.path.resolve().name,
            tags=list(settings.tags) or None,
            mode=settings.mode,
            dir=str(folder.path),
            id=run_id,
            resume="allow",
            config=run_config(folder),
            allow_val_change=True,
            # A run of the trainer's own stays as it is, and so does its standard output.
            reinit="create_new",
            settings=wandb.Settings(console="off", login_timeout=30),
        )
        if folder.wandb_id is None:
            folder.keep_wandb_id(run_id)
        # wandb's own step only grows; ours lets a resumed attempt log earlier steps again.
        self._run.define_metric(STEP_TAG)
        self._run.define_metric("*", step_metric=STEP_TAG)

    def record(self, record: Record) -> None:
        for step, scalars in scalars_by_step(record).items():
            values: dict[str, Any] = {STEP_TAG: step, **scalars}
            if step == record.step:
                values.update(param_scalars(record.params, self._selected))
                for tag, bins in param_histograms(record.params, self._selected).items():
                    values[tag] = self._wandb.Histogram(
                        np_histogram=(bins.counts.tolist(), bins.edges.tolist())
                    )
            self._run.log(values)

    def alert(self, alert: Alert) -> None:
        self._run.alert(
            title=f"{alert.rule} at step {alert.step}",
            text=body(alert),
            level=LEVELS[alert.severity],
            wait_duration=0,
        )

    def close(self) -> None:
        self._run.finish()


def run_config(folder: RunFolder) -> dict[str, Any]:
    """What wandb shows as the run's config: ours, plus the size of the model and the job."""
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
