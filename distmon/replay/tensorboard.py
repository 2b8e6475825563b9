"""Read TensorBoard event files of any writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distmon.errors import ConfigError
from distmon.replay.logs import Log, LogError


def is_event_file(path: Path) -> bool:
    """Return whether it is an event file, by its name as TensorBoard does."""
    return "tfevents" in path.name


def read_events(path: Path) -> Log:
    """Read all scalars of a folder of event files or of one file; a repeated step replaces."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ConfigError(
            "reading TensorBoard files needs a package: pip install 'distmon[tensorboard]'"
        ) from None
    # 0 keeps every value; the default subsamples.
    events: Any = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    try:
        events.Reload()
    except Exception as error:
        raise LogError(f"cannot read {path}: {error}") from None
    columns: dict[str, dict[int, float]] = {}
    times: dict[int, float] = {}
    tags = events.Tags()
    for tag in tags["scalars"]:
        found = events.Scalars(tag)
        columns[tag] = {event.step: float(event.value) for event in found}
        times |= {event.step: event.wall_time for event in found}
    for tag in tags["tensors"]:
        # Newer writers store a scalar as a 0-dimensional tensor.
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            found = events.Tensors(tag)
            columns[tag] = {e.step: float(make_ndarray(e.tensor_proto)) for e in found}
            times |= {event.step: event.wall_time for event in found}
    if not columns:
        raise LogError(f"{path} holds no scalars")
    return Log(columns, times)
