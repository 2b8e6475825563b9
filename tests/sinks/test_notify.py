"""What is sent to people, and how much of it; the services are stand-ins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_alerts import FROZEN, NAN
from sample_run import MakeRecord

from distmon.config import NotifyConfig
from distmon.rules.alert import Severity
from distmon.sinks.apprise_service import DeliveryError
from distmon.sinks.notify import HourlyLimit, NotifySink, body, title


class Told:
    """A service that remembers, and fails as long as it is told to."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, Severity]] = []
        self.failing = False

    def send(self, title: str, body: str, severity: Severity) -> None:
        if self.failing:
            raise DeliveryError("closed today")
        self.messages.append((title, body, severity))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_message_has_location_and_advice() -> None:
    assert title(NAN, "demo") == "CRITICAL nonfinite at step 120: run demo"
    assert body(NAN) == (
        "NaN in the gradient.\n\n"
        "parameters: blocks.0.mlp.weight, blocks.1.mlp.weight, blocks.2.mlp.weight, "
        "blocks.3.mlp.weight, blocks.4.mlp.weight and 2 more\n"
        "layers: blocks.0\nranks: 0, 3\n\n"
        "1. Lower the learning rate.\n2. Look at the data."
    )
    assert body(FROZEN) == "It does not move."
    assert len(body(replace(FROZEN, message="long " * 1000))) == 1000


def test_only_what_is_severe_enough_goes_out(make_record: MakeRecord) -> None:
    for least, expected in (("info", 3), ("warning", 2), ("critical", 1)):
        told = Told()
        sink = NotifySink(told, NotifyConfig(severity=least), "demo")
        sink.record(make_record(1))
        for severity in ("info", "warning", "critical"):
            sink.alert(replace(FROZEN, severity=severity))
        sink.close()
        assert len(told.messages) == expected


def test_alerts_over_the_hourly_limit_are_summarized_later() -> None:
    told, clock = Told(), Clock()
    sink = NotifySink(told, NotifyConfig(per_hour=4), "demo", clock)
    for minute in range(7):
        clock.now = 60 * minute
        sink.alert(replace(FROZEN, step=minute, rule="frozen" if minute < 6 else "loss_spike"))
    assert [severity for *_, severity in told.messages] == ["warning"] * 3
    clock.now = 3599
    sink.alert(FROZEN)
    assert len(told.messages) == 3
    sink.alert(NAN)  # one message of four is kept for it
    assert told.messages[-1][1].endswith(
        "\n\n5 more alerts were not sent because of the hourly limit: 4 frozen, 1 loss_spike."
    )
    clock.now = 3600 + 59  # the first message is more than an hour old, the critical one counts
    sink.alert(FROZEN)
    assert len(told.messages) == 4
    clock.now = 3600 + 60
    sink.alert(FROZEN)
    assert told.messages[-1][1] == (
        "It does not move.\n\n1 more alert was not sent because of the hourly limit: 1 frozen."
    )
    sink.close()
    assert len(told.messages) == 5


def test_unsent_alerts_are_summarized_at_close() -> None:
    told = Told()
    sink = NotifySink(told, NotifyConfig(per_hour=1), "demo", Clock())
    sink.alert(FROZEN)
    sink.alert(NAN)
    sink.close()
    assert told.messages[1:] == [
        (
            "Alerts that were not sent: run demo",
            "1 more alert was not sent because of the hourly limit: 1 nonfinite.",
            "warning",
        )
    ]


def test_undelivered_alerts_are_summarized_in_the_next_message() -> None:
    told = Told()
    sink = NotifySink(told, NotifyConfig(per_hour=2), "demo", Clock())
    told.failing = True
    for _ in range(3):
        with pytest.raises(DeliveryError):
            sink.alert(NAN)
    told.failing = False
    sink.alert(FROZEN)  # what did not arrive does not use up the hour
    assert (
        told.messages[-1][1]
        == "It does not move.\n\n3 more alerts were not delivered: 3 nonfinite."
    )
    sink.close()
    assert len(told.messages) == 1


@pytest.mark.parametrize(("per_hour", "for_all"), [(1, 1), (2, 1), (4, 3), (20, 15)])
def test_warnings_leave_room_for_critical_alerts(per_hour: int, for_all: int) -> None:
    limit = HourlyLimit(per_hour, Clock())
    for _ in range(for_all):
        assert limit.admits("warning")
        limit.count()
    assert not limit.admits("warning")
    assert not limit.admits("info")
    for _ in range(per_hour - for_all):
        assert limit.admits("critical")
        limit.count()
    assert not limit.admits("critical")
