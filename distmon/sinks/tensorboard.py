"""TensorBoard event files in the run folder's `tb/`."""

from __future__ import annotations

from typing import Any

from distmon.errors import ConfigError
from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks.base import SinkContext
from distmon.sinks.notify import body
from distmon.sinks.tags import param_histograms, param_scalars, scalars_by_step


def open_sink(context: SinkContext) -> TensorBoardSink:
    """Return the sink of a monitor."""
    return TensorBoardSink(context.folder, context.tagged_params)


class TensorBoardSink:
    """Writes the scalars of every record, alerts as text, and tags of the selected parameters."""

    def __init__(self, folder: RunFolder, selected: frozenset[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "the sink \"tensorboard\" needs a package: pip install 'distmon[tensorboard]'"
            ) from None
        self._selected = selected
        self._folder = folder
        self._purged = folder.attempt == 0
        self._writer: Any = SummaryWriter(str(folder.tensorboard_path))

    def _purge(self, record: Record) -> None:
        """Let TensorBoard hide what earlier attempts wrote of the steps that this one writes.

        The first record after a resume may have losses from before the checkpoint, which an
        earlier attempt has written too.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._purged = True
        first = min((self._folder.resumed_from or 0) + 1, record.step, *record.losses)
        start = SessionLog(status=SessionLog.START)
        self._writer.file_writer.event_writer.add_event(Event(step=first, session_log=start))

    def record(self, record: Record) -> None:
        if not self._purged:
            self._purge(record)
        write = self._writer
        for step, scalars in scalars_by_step(record).items():
            for tag, value in scalars.items():
                write.add_scalar(tag, value, step, walltime=record.time)
        for tag, value in param_scalars(record.params, self._selected).items():
            write.add_scalar(tag, value, record.step, walltime=record.time)
        for tag, bins in param_histograms(record.params, self._selected).items():
            write.add_histogram_raw(
                tag,
                min=bins.smallest,
                max=bins.largest,
                num=float(bins.counts.sum()),
                sum=bins.total,
                sum_squares=bins.total_squares,
                bucket_limits=bins.edges[1:].tolist(),
                bucket_counts=bins.counts.tolist(),
                global_step=record.step,
                walltime=record.time,
            )
        write.flush()

    def alert(self, alert: Alert) -> None:
        text = f"**{alert.severity.upper()}** step {alert.step}: {body(alert)}"
        self._writer.add_text(f"alerts/{alert.rule}", text, alert.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
