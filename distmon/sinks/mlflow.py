"""MLflow: metrics of a run on its tracking server or in its file store."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from distmon.errors import ConfigError
from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks.base import SinkContext
from distmon.sinks.notify import body
from distmon.sinks.tags import param_scalars, scalars_by_step

FORBIDDEN: Final = re.compile(r"[^\w\-. /:]")
"""Characters that a name in MLflow cannot have."""


def open_sink(context: SinkContext) -> MlflowSink:
    """Return the sink of a monitor."""
    return MlflowSink(context.folder, context.tagged_params)


class MlflowSink:
    """Logs to the trainer's active run, or to one that is named after the run folder.

    Names are those of the other sinks, under `distmon/` in a run of the trainer; alerts are tags
    `distmon.alert.<rule>`. The server, the store and the experiment are those that MLflow's
    environment or the trainer has set.
    """

    def __init__(self, folder: RunFolder, selected: frozenset[str]) -> None:
        try:
            import mlflow
            from mlflow.entities import Metric
        except ImportError:
            raise ConfigError(
                "the sink \"mlflow\" needs a package: pip install 'distmon[mlflow]'"
            ) from None
        self._metric: Any = Metric
        self._selected = selected
        self._client: Any = mlflow.MlflowClient()
        active = active_run()
        self._joined = active is not None
        self._prefix = "distmon/" if self._joined else ""
        self._run_id = active or self._new_run(mlflow, folder)

    def _new_run(self, mlflow: Any, folder: RunFolder) -> str:
        name = folder.path.resolve().name
        experiment = mlflow.tracking.fluent._get_experiment_id()
        run = self._client.create_run(experiment, run_name=name)
        for key in ("interval", "sample_size", "seed"):
            self._client.log_param(run.info.run_id, f"distmon.{key}", folder.config.get(key))
        return str(run.info.run_id)

    def record(self, record: Record) -> None:
        at = int(1000 * record.time)
        by_step = scalars_by_step(record)
        by_step[record.step].update(param_scalars(record.params, self._selected))
        metrics = [
            self._metric(FORBIDDEN.sub("_", self._prefix + tag), value, at, step)
            for step, scalars in by_step.items()
            for tag, value in scalars.items()
            if math.isfinite(value)  # file stores and databases refuse others
        ]
        for begin in range(0, len(metrics), 1000):  # the most that a request may have
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + 1000])

    def alert(self, alert: Alert) -> None:
        text = f"step {alert.step}, {alert.severity}: {body(alert)}"
        self._client.set_tag(self._run_id, f"distmon.alert.{alert.rule}", text[:5000])

    def close(self) -> None:
        if not self._joined:
            self._client.set_terminated(self._run_id)


def active_run() -> str | None:
    """Return the id of the run that the training has started, if there is one.

    MLflow keeps active runs by thread, and a sink has a thread of its own.
    """
    from mlflow.tracking import fluent

    by_thread: Any = getattr(fluent, "_active_run_stack", None)
    if not hasattr(by_thread, "get_all_thread_values"):
        return None
    stacks = by_thread.get_all_thread_values().values()
    return next((str(stack[-1].info.run_id) for stack in stacks if stack), None)
