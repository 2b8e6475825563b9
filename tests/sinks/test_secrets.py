from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_services import HttpService, http_service
from rich.console import Console
from sample_alerts import NAN
from sample_run import MakeRecord

from distmon.config import load_config
from distmon.runs.run_folder import RunFolder
from distmon.sinks import Delivery, build_factories
from distmon.sinks.wandb import run_config

SECRETS = ("hunter2pw", "w3bh00k", "h34der", "sm7ppass", "sp1tout")


def test_secrets_are_nowhere(
    make_record: MakeRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Everything that is written while services take messages, refuse them and break down."""
    from apprise.decorators import notify

    monkeypatch.setattr("apprise.NotifyBase.request_rate_per_sec", 0)

    @notify(on="breaksdown")
    def _break_down(*_: object, meta: Any, **__: object) -> bool:
        raise RuntimeError(f"cannot reach {meta['url']} with {meta['schema']}://sp1tout")

    @notify(on="tellsall")
    def _tell_all(*_: object, meta: Any, **__: object) -> bool:
        logging.getLogger("apprise").warning("no luck at %s", meta["url"])
        return False

    def write(refuse: Callable[[int], int]) -> HttpService:
        with http_service(refuse) as service:
            urls = [
                f"json://me:hunter2pw@{service.address}/w3bh00k?+X-Own=h34der",
                "json://me:hunter2pw@127.0.0.1:9/w3bh00k?+X-Own=h34der",
                "mailto://bot:sm7ppass@example.com:9?smtp=127.0.0.1&mode=insecure",
                "breaksdown://me:hunter2pw@127.0.0.1/sp1tout",
                "tellsall://me:hunter2pw@127.0.0.1/sp1tout",
            ]
            values: dict[str, Any] = {
                "sinks": ["console", "jsonl"],
                "run_dir": tmp_path / "run",
                "notify": {"urls": [*urls[:2], "env:MORE_HOOKS"], "attempts": 1},
                "actions": {"bundle": ["critical"]},
            }
            monkeypatch.setenv("MORE_HOOKS", " ".join(urls[2:]))
            monkeypatch.setenv("DISTMON_NOTIFY__TIMEOUT_S", "5")
            monkeypatch.setattr(sys, "argv", ["train.py", "--notify", *urls])
            config = load_config(values)
            folder = RunFolder.open(
                config.run_dir, config=config.model_dump(mode="json"), parameters=[]
            )
            folder.begin_attempt(resumed_from=0, world_size=1)
            console = Console(file=sys.stdout)
            delivery = Delivery(build_factories(config, folder, console), config.queue_size)
            delivery.post_record(make_record(119))
            delivery.post_alert(NAN)
            stats = delivery.close()
            for name in ("json-2", "mailto", "breaksdown", "tellsall"):
                # The alert, and the message at the end that it was not delivered.
                assert stats[f"notify-{name}"]["failed"] == 2
            print(config, repr(config.notify), run_config(folder), delivery.stats())
        return service

    with caplog.at_level(1):
        assert len(write(lambda _: 200).posts) == 1
        assert len(write(lambda _: 500).posts) == 2
    out, err = capfd.readouterr()
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert any(path.name == "environment.json" for path in files)
    assert "CRITICAL nonfinite" in out
    assert "error=500" in caplog.text
    assert "no luck at ***" in caplog.text
    for secret in SECRETS:
        assert secret not in out + err
        assert secret not in caplog.text
        assert not [path for path, content in files.items() if secret.encode() in content]
