"""Messages on their way to real services on loopback."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import pytest
from local_services import http_service, smtp_service
from pydantic import SecretStr
from sample_alerts import FROZEN, NAN
from sample_run import MakeRecord, OpenFolder

from distmon.config import MonitorConfig, NotifyConfig, load_config
from distmon.errors import ConfigError
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks import Delivery, build_factories
from distmon.sinks.apprise_service import AppriseService, DeliveryError, resolve_urls
from distmon.sinks.notify import body, title


def opened(url: str, **settings: Any) -> AppriseService:
    service = AppriseService.open(SecretStr(url), NotifyConfig(**settings), pause_s=0.01)
    assert service is not None
    return service


def deliver(config: MonitorConfig, folder: RunFolder, *alerts: Alert, **more: Any) -> Any:
    delivery = Delivery(build_factories(config, folder, **more), config.queue_size)
    for alert in alerts:
        delivery.post_alert(alert)
    return delivery.close()


def test_a_webhook_gets_every_alert_once_and_no_records(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    folder = open_folder()
    with http_service() as first, http_service() as second:
        urls = f"json://{first.address}/hook"
        config = load_config({"sinks": [], "notify": {"urls": f"{urls}, env:HOOKS"}}, environ={})
        environ = {"HOOKS": f"json://{second.address}/a json://{second.address}/b"}
        delivery = Delivery(build_factories(config, folder, environ=environ), config.queue_size)
        delivery.post_record(make_record(1))
        delivery.post_alert(NAN)
        delivery.post_alert(FROZEN)
        fate = {"written": 2, "failed": 0, "dropped": 0}
        assert delivery.close() == {
            "notify-json": fate,
            "notify-json-2": fate,
            "notify-json-3": fate,
        }
    path, post = first.posts[0]
    assert (path, post["type"], post["title"]) == ("/hook", "failure", title(NAN, "run"))
    assert post["message"] == body(NAN)
    assert first.posts[1][1]["type"] == "warning"
    assert sorted(path for path, _ in second.posts) == ["/a", "/a", "/b", "/b"]


def test_mail_keeps_its_lines(open_folder: OpenFolder) -> None:
    with smtp_service("bot", "hunter2pw") as mail:
        url = f"mailto://bot:hunter2pw@example.com:{mail.port}?smtp=127.0.0.1&mode=insecure"
        config = MonitorConfig(sinks=(), notify={"urls": [f"{url}&to=team@example.com"]})
        assert deliver(config, open_folder(), NAN)["notify-mailto"]["written"] == 1
    (message,) = mail.mails
    assert message["Subject"] == title(NAN, "run")
    assert message["To"] == "team@example.com"
    text = message.get_payload(decode=True)
    assert isinstance(text, bytes)
    assert text.decode().splitlines() == body(NAN).splitlines()


def test_a_wrong_mail_password_is_a_failure_without_it() -> None:
    with smtp_service("bot", "hunter2pw") as mail:
        url = f"mailto://bot:wrongpw@example.com:{mail.port}?smtp=127.0.0.1&mode=insecure"
        with pytest.raises(DeliveryError) as caught:
            opened(f"{url}&to=team@example.com", attempts=1).send("title", "body", "warning")
    assert "wrongpw" not in str(caught.value)
    assert "mail" in str(caught.value).lower()
    assert mail.mails == []


def test_those_who_have_a_message_do_not_get_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apprise.NotifyBase.request_rate_per_sec", 0)
    with smtp_service("bot", "hunter2pw") as mail:
        mail.refused.add("b@example.com")
        url = f"mailto://bot:hunter2pw@example.com:{mail.port}?smtp=127.0.0.1&mode=insecure"
        service = opened(f"{url}&to=a@example.com,b@example.com")
        service.send("title", "body", "warning")
    assert [message["To"] for message in mail.mails] == ["a@example.com", "b@example.com"]


def test_a_service_that_recovers_gets_the_message_once_more() -> None:
    with http_service(lambda post: 500 if post < 3 else 200) as service:
        opened(f"json://{service.address}/x", attempts=3).send("title", "body", "info")
        assert len(service.posts) == 3
    # A pool would be waited for at the end of the process, however long a service hangs.
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPool")]
    with http_service(lambda _: 500) as service:
        with pytest.raises(DeliveryError, match=r"Internal server error\., error=500"):
            opened(f"json://{service.address}/x", attempts=2).send("title", "body", "info")
        assert len(service.posts) == 2


def test_posting_does_not_wait_for_a_service_that_hangs(
    make_record: MakeRecord, open_folder: OpenFolder
) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(_: int) -> int:
        asked.set()
        release.wait(30)
        return 200

    with http_service(hang) as stuck, http_service() as fine:
        urls = [f"json://{stuck.address}/x?rto=30", f"json://{fine.address}/x"]
        config = MonitorConfig(sinks=(), queue_size=4, notify={"urls": urls})
        delivery = Delivery(build_factories(config, open_folder()), config.queue_size)
        delivery.post_alert(NAN)
        assert asked.wait(10)
        for step in range(8):
            delivery.post_record(make_record(step, params=1))
        delivery.post_alert(FROZEN)
        assert not release.is_set()  # all of it was posted while nobody answered
        arrived = threading.Event()
        fine.answer = lambda _: arrived.set() or 200  # type: ignore[func-returns-value]
        delivery.post_alert(FROZEN)
        assert arrived.wait(10)
        assert len(stuck.posts) == 1
        assert delivery.stats()["notify-json"] == {"written": 0, "failed": 0, "dropped": 0}
        release.set()
        stats = delivery.close()
    assert stats["notify-json"]["written"] == stats["notify-json-2"]["written"] == 3


def test_a_service_that_never_answers_is_given_up() -> None:
    release = threading.Event()
    with http_service(lambda _: 200 if release.wait(30) else 500) as service:
        with pytest.raises(DeliveryError, match="A Connection error occurred"):
            opened(f"json://{service.address}/x", timeout_s=0.1, attempts=2).send("t", "b", "info")
        release.set()
        assert len(service.posts) == 2


SERVICES = [
    ("slack", "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", "/T1JJ3T3L2/A1BRTD4JD/TIi"),
    ("discord", "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js", "/4174216298/JHMHI8qBe7b"),
    ("pagerduty", "pagerduty://A1BRTD4JD@TIiajkdnlazkcOXrIdevi7F/node01/gpu", "/enqueue"),
]


@pytest.mark.parametrize(("name", "url", "path"), SERVICES)
def test_services_by_name(
    name: str,
    url: str,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import apprise.plugins.pagerduty
    from apprise.plugins.discord import NotifyDiscord
    from apprise.plugins.slack import NotifySlack

    with http_service() as service, caplog.at_level(1):
        there = f"http://{service.address}"
        monkeypatch.setattr(NotifySlack, "webhook_url", there)
        monkeypatch.setattr(NotifyDiscord, "notify_url", there)
        monkeypatch.setitem(
            apprise.plugins.pagerduty.PAGERDUTY_API_LOOKUP, "us", f"{there}/enqueue"
        )
        opened_service = opened(url)
        assert opened_service.name == name
        opened_service.send(title(NAN, "demo"), body(NAN), "critical")
        ((posted_to, post),) = service.posts
    assert posted_to.startswith(path)
    assert "NaN in the gradient." in str(post)
    assert "Lower the learning rate." in str(post)
    assert "TIiajkdnlazkcOXr" not in caplog.text
    assert "JHMHI8qBe7bk2ZwO" not in caplog.text


def test_settings_of_the_url_and_of_the_service_are_kept() -> None:
    def plugin(url: str) -> Any:
        return opened(url, timeout_s=7)._sender[0]

    assert plugin("mailto://bot:hunter2@example.com").request_rate_per_sec == 1.2
    assert plugin("json://127.0.0.1/x").request_rate_per_sec == 0
    plain, own = plugin("json://127.0.0.1/x"), plugin("json://127.0.0.1/x?rto=3&overflow=split")
    assert (plain.socket_read_timeout, plain.socket_connect_timeout) == (7, 7)
    assert (own.socket_read_timeout, own.socket_connect_timeout) == (3, 7)
    assert (plain.overflow_mode, own.overflow_mode) == ("truncate", "split")


@pytest.mark.parametrize("url", ["slack://hunter2", "hunter2://x", "hunter2", "mailto://hunter2"])
def test_a_bad_url_is_one_sentence_without_it(
    url: str, open_folder: OpenFolder, caplog: pytest.LogCaptureFixture
) -> None:
    config = MonitorConfig(sinks=(), notify={"urls": ["json://127.0.0.1/x", url]})
    with caplog.at_level(1), pytest.raises(ConfigError) as caught:
        build_factories(config, open_folder())
    assert str(caught.value).startswith("apprise rejects URL 2 of notify.urls: use the form")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in caplog.text


def test_variables_that_do_not_help_are_named() -> None:
    with pytest.raises(ConfigError, match=r"notify.urls\[0\] takes .* variable HOOK, .* not set"):
        resolve_urls([SecretStr("env:HOOK")], {})
    with pytest.raises(ConfigError, match=r"variable HOOK, which is not set"):
        resolve_urls([SecretStr("env:HOOK")], {"HOOK": "  "})
    with pytest.raises(ConfigError, match=r"urls\[1\] must name an environment variable") as caught:
        resolve_urls([SecretStr("json://x"), SecretStr("env:slack://hunter2")], {})
    assert "hunter2" not in str(caught.value)


MISSING = "notify.urls needs apprise 2 or newer: pip install 'distmon[alerts]'"


def test_a_missing_or_old_package_is_named_with_its_extra(
    open_folder: OpenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder()
    config = MonitorConfig(notify={"urls": ["slack://hunter2"]})
    with monkeypatch.context() as old:
        old.setattr("distmon.sinks.apprise_service.version", lambda _: "1.9.9")
        with pytest.raises(ConfigError, match="needs apprise 2 or newer"):
            build_factories(config, folder)
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert [name for name, _ in build_factories(MonitorConfig(sinks=("jsonl",)), folder)] == [
        "jsonl"
    ]
    with pytest.raises(ConfigError) as caught:
        build_factories(config, folder)
    assert str(caught.value) == MISSING


def test_others_hear_what_their_own_apprise_says(caplog: pytest.LogCaptureFixture) -> None:
    with http_service() as service, caplog.at_level(logging.DEBUG):
        opened(f"json://{service.address}/x").send("title", "body", "info")
        assert not [r for r in caplog.records if r.name in ("apprise", "urllib3.connectionpool")]
        logging.getLogger("apprise").warning("of somebody else")
    assert "of somebody else" in caplog.text
