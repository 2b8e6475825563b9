from __future__ import annotations

import math
import time
from typing import Any

import pytest
from sample_run import MakeRecord, OpenFolder

from distmon.config import MonitorConfig
from distmon.errors import ConfigError
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks import Delivery, build_factories
from distmon.sinks.tensorboard import TensorBoardSink


def events(folder: RunFolder) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder.tensorboard_path), size_guidance={"scalars": 0})
    found.Reload()
    return found


def scalars(folder: RunFolder, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 5)) for event in events(folder).Scalars(tag)]


def test_scalars_alerts_and_selected_parameters(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    record = make_record(10)
    name = record.params.names[0]
    sink = TensorBoardSink(folder, frozenset({name}))
    sink.record(record)
    sink.alert(Alert("frozen", "warning", 10, "it is frozen", advice=("thaw it",)))
    # Flushed per record: a crash from here on loses nothing.
    found = events(folder)
    tags = set(found.Tags()["scalars"])
    parameter_tags = {tag for tag in tags if name in tag}
    assert tags - parameter_tags == set(record.metrics)
    assert parameter_tags == {
        *(f"gradients/{name}/{part}" for part in ("norm", "mean", "std")),
        *(f"updates/{name}/{part}" for part in ("ratio", "update_norm", "weight_norm")),
    }
    assert scalars(folder, "train/step_loss") == [(9, 2.5), (10, 2.1847)]
    assert scalars(folder, "train/step_loss_ema") == [(9, 2.4), (10, 2.3)]
    assert found.Tags()["histograms"] == [f"gradients_hist/{name}"]
    histogram = found.Histograms(f"gradients_hist/{name}")[0].histogram_value
    assert sum(histogram.bucket) == histogram.num == 64
    text = found.Tensors("alerts/frozen/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "**WARNING** step 10: it is frozen" in text
    assert "1. thaw it" in text
    sink.close()


def test_a_resumed_attempt_hides_the_steps_it_runs_again(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    first = TensorBoardSink(folder, frozenset())
    for step in (10, 20, 30):
        first.record(make_record(step, metrics={"monitor/grad_norm": 1.0}))
    first.close()
    # TensorBoard reads files in the order of their names, which begin with the second.
    time.sleep(1.1)
    second = TensorBoardSink(open_folder(resumed_from=15), frozenset())
    second.record(make_record(20, metrics={"monitor/grad_norm": 2.0}))
    second.close()
    assert scalars(folder, "monitor/grad_norm") == [(10, 1.0), (20, 2.0)]


def test_a_resume_between_two_records_writes_no_step_twice(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    first = TensorBoardSink(folder, frozenset())
    first.record(make_record(10, losses=dict.fromkeys(range(1, 11), 1.0), loss_ema={}))
    first.record(make_record(20, losses=dict.fromkeys(range(11, 21), 1.0), loss_ema={}))
    first.close()
    time.sleep(1.1)  # see above
    # The checkpoint of step 15 has the losses of the steps 11 to 15.
    second = TensorBoardSink(open_folder(resumed_from=15), frozenset())
    second.alert(Alert("frozen", "critical", 16, "it is frozen"))
    second.record(make_record(20, losses=dict.fromkeys(range(11, 21), 2.0), loss_ema={}))
    second.close()
    expected = [(s, 1.0) for s in range(1, 11)] + [(s, 2.0) for s in range(11, 21)]
    assert scalars(folder, "train/step_loss") == expected


def test_a_loss_that_is_nan_is_logged(make_record: MakeRecord, open_folder: OpenFolder) -> None:
    folder = open_folder()
    sink = TensorBoardSink(folder, frozenset())
    sink.record(make_record(10, losses={10: float("nan")}, loss_ema={}))
    sink.close()
    assert math.isnan(scalars(folder, "train/step_loss")[0][1])


def test_every_sink_together(make_record: MakeRecord, open_folder: OpenFolder) -> None:
    folder = open_folder(params=3)
    config = MonitorConfig(sinks=("jsonl", "arrow", "tensorboard"), param_tags=("*.mlp.*",))
    delivery = Delivery(build_factories(config, folder), config.queue_size)
    delivery.post_record(make_record(10))
    stats = delivery.close(20)
    assert list(stats) == ["jsonl", "arrow", "tensorboard"]
    assert all(counts == {"written": 1, "failed": 0, "dropped": 0} for counts in stats.values())
    names = {tag for tag in events(folder).Tags()["scalars"] if tag.startswith("updates/")}
    assert {tag.split("/")[1] for tag in names} == {"blocks.0.mlp.weight"}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_extra(
    open_folder: OpenFolder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, name, None)
    folder = open_folder()
    build_factories(MonitorConfig(sinks=("jsonl",)), folder)
    with pytest.raises(ConfigError) as caught:
        build_factories(MonitorConfig(sinks=(name,)), folder)
    assert str(caught.value) == (
        f"the sink \"{name}\" needs a package: pip install 'distmon[{name}]'"
    )
