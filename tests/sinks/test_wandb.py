from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_run import MakeRecord, OpenFolder

from distmon.config import MonitorConfig
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks import Delivery, build_factories

CONFIG = MonitorConfig(sinks=("wandb",), param_tags=("blocks.0.attn.*",))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def stored(path: Path) -> Iterator[Any]:
    """What wandb wrote, message by message.

    The file is a LevelDB log: a 7-byte file header, then chunks (checksum, length, kind) that do
    not cross 32 KiB blocks; kinds 1 to 4 are a whole message, its first, middle and last part.
    """
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] in (b"", b":W&B")
    place, parts = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if place + 7 + length > len(content):
            return  # still being written
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            message = wandb_internal_pb2.Record()
            message.ParseFromString(parts)
            parts = b""
            yield message


def finished(path: Path) -> Path:
    """Wait for the end of the file: wandb's service process writes it after `finish()` returned."""
    deadline = time.monotonic() + 120
    while not any(message.HasField("exit") for message in stored(path)):
        assert time.monotonic() < deadline, f"{path} never ended"
        time.sleep(0.05)
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in m.history.item
        }
        for m in stored(path)
        if m.HasField("history")
    ]


def deliver(folder: RunFolder, *items: Any) -> None:
    delivery = Delivery(build_factories(CONFIG, folder), CONFIG.queue_size)
    for item in items:
        if isinstance(item, Alert):
            delivery.post_alert(item)
        else:
            delivery.post_record(item)
    assert delivery.close(30)["wandb"] == {"written": len(items), "failed": 0, "dropped": 0}


def test_offline_run_with_alerts_and_a_rewind(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    alert = Alert("frozen", "critical", 20, "it is frozen", advice=("thaw it",))
    deliver(folder, make_record(10), make_record(20), alert)
    run_id = json.loads((folder.path / "run.json").read_text())["wandb_id"]
    (first,) = folder.path.glob("wandb/offline-run-*/*.wandb")
    assert first.name == f"run-{run_id}.wandb"

    logged = rows(finished(first))
    assert [row["train/step"] for row in logged] == [9, 10, 19, 20]
    assert [row["train/step_loss"] for row in logged] == [2.5, 2.1847, 2.5, 2.1847]
    assert logged[1]["monitor/grad_norm"] == 0.81
    per_parameter = {tag for tag in logged[1] if "blocks" in tag}
    name = "blocks.0.attn.weight"
    assert all(name in tag for tag in per_parameter)
    assert len({tag for tag in per_parameter if not tag.startswith("gradients_hist/")}) == 6
    assert sum(logged[1][f"gradients_hist/{name}/values"]) == 64

    messages = list(stored(first))
    (sent,) = [message.alert for message in messages if message.HasField("alert")]
    assert (sent.title, sent.level) == ("frozen at step 20", "ERROR")
    assert sent.text == "it is frozen\n\n1. thaw it"
    settings = {
        item.key: json.loads(item.value_json)
        for message in messages
        for source in (message.run.config, message.config)
        for item in source.update
        if item.key
    }
    assert settings["interval"] == 10
    assert settings["parameters"] == 3 * 32
    assert settings["parameter_tensors"] == 3
    assert settings["world_size"] == 2
    metrics = [message.metric for message in messages if message.HasField("metric")]
    assert ("*", "train/step") in {(metric.glob_name, metric.step_metric) for metric in metrics}

    # wandb names the offline directory by the second.
    while time.strftime("%Y%m%d_%H%M%S") in first.parent.name:
        time.sleep(0.05)
    deliver(open_folder(resumed_from=10), make_record(20))
    (second,) = set(folder.path.glob("wandb/offline-run-*/*.wandb")) - {first}
    assert second.name == first.name
    assert [row["train/step"] for row in rows(finished(second))] == [19, 20]


def test_the_trainers_active_run_is_joined_and_its_steps_stay(
    make_record: MakeRecord, open_folder: OpenFolder, tmp_path: Path
) -> None:
    import wandb

    folder = open_folder()
    active = wandb.init(project="mine", dir=str(tmp_path), mode="offline")
    try:
        for step in (1, 2, 3):
            active.log({"my/loss": 1.0 / step}, step=step)
            if step == 2:
                deliver(folder, make_record(20))  # closes the sink, not the run
        assert wandb.run is active
    finally:
        path = Path(active.dir).parent / f"run-{active.id}.wandb"
        active.finish()
    assert not (folder.path / "wandb").exists(), "no second run"
    logged = rows(finished(path))
    assert [row["my/loss"] for row in logged] == [1.0, 0.5, pytest.approx(1 / 3)]
    (joined,) = [row for row in logged if "distmon/train/step" in row]
    assert joined["distmon/train/step"] == 20
    assert joined["distmon/monitor/grad_norm"] == 0.81
    metrics = [message.metric for message in stored(path) if message.HasField("metric")]
    assert ("distmon/*", "distmon/train/step") in {(m.glob_name, m.step_metric) for m in metrics}
    assert not any(metric.glob_name == "*" for metric in metrics)
