"""TensorBoard event files in the run folder's `tb/`, written without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from distmon.errors import ConfigError
from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks.base import SinkContext
from distmon.sinks.event_file import EventFile
from distmon.sinks.notify import body
from distmon.sinks.tags import param_histograms, param_scalars, scalars_by_step


def open_sink(context: SinkContext) -> TensorBoardSink:
    """Return the sink of a monitor."""
    return TensorBoardSink(context.folder, context.tagged_params)


class TensorBoardSink:
    """Writes the scalars of every record, alerts as text, and tags of the selected parameters."""

    writes_files = True

    def __init__(self, folder: RunFolder, selected: frozenset[str]) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
            from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
        except ImportError:
            raise ConfigError(
                "the sink \"tensorboard\" needs a package: pip install 'distmon[tensorboard]'"
            ) from None
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2.TensorProto
        self._shape: Any = TensorShapeProto
        self._text_version: bytes = TextPluginData(version=0).SerializeToString()
        self._selected = selected
        self._folder = folder
        folder.restore()
        version = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._file = EventFile(folder.tensorboard_path, folder.attempt, version)
        self._purged = folder.attempt == 0 or self._file.continues

    def _purge(self, record: Record) -> Any:
        """Return an event that hides what earlier attempts wrote of the steps of this one.

        The first record after a resume may have losses from before the checkpoint, which an
        earlier attempt has written too.
        """
        first = min((self._folder.resumed_from or 0) + 1, record.step, *record.losses)
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        return self._event.Event(step=first, session_log=start)

    def record(self, record: Record) -> None:
        events = [] if self._purged else [self._purge(record)]
        for step, scalars in scalars_by_step(record).items():
            events += self._events(self._scalars(scalars), step, record.time)
        values = self._scalars(param_scalars(record.params, self._selected))
        for tag, bins in param_histograms(record.params, self._selected).items():
            histogram = self._summary.HistogramProto(
                min=bins.smallest,
                max=bins.largest,
                num=float(bins.counts.sum()),
                sum=bins.total,
                sum_squares=bins.total_squares,
                bucket_limit=bins.edges[1:].tolist(),
                bucket=bins.counts.tolist(),
            )
            values.append(self._summary.Summary.Value(tag=tag, histo=histogram))
        self._file.append(events + self._events(values, record.step, record.time))
        self._purged = True

    def alert(self, alert: Alert) -> None:
        text = f"**{alert.severity.upper()}** step {alert.step}: {body(alert)}"
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(
                plugin_name="text", content=self._text_version
            )
        )
        tensor = self._tensor(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=self._shape(dim=[self._shape.Dim(size=1)]),
        )
        tag = f"alerts/{alert.rule}/text_summary"
        value = self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._file.append(self._events([value], alert.step, time.time()))

    def close(self) -> None:
        self._file.close()

    def _scalars(self, scalars: Mapping[str, float]) -> list[Any]:
        value: Any = self._summary.Summary.Value
        return [value(tag=tag, simple_value=number) for tag, number in scalars.items()]

    def _events(self, values: list[Any], step: int, at: float) -> list[Any]:
        """Return an event with the values; nothing without values."""
        if not values:
            return []
        summary = self._summary.Summary(value=values)
        return [self._event.Event(wall_time=at, step=step, summary=summary)]
