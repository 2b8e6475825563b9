from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import ValidationError

from distmon.config import MonitorConfig, load_config
from distmon.errors import ConfigError
from distmon.redaction import Redactor
from distmon.rules.alert import Alert
from distmon.sinks import Delivery, Sink
from distmon.sinks.environment import SHOWN_VARIABLES

SLACK = "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#alerts"
JSON = "json://me:hunter2@127.0.0.1:8080/hook/w3bh00k?-key=q%2Fuery1&format=text"
MAIL = "mailto://sender:pa%20ss@example.com?smtp=mail.example.com&to=team@example.com"
PUSHBULLET = "pbul://o.gn5kj6nfhv736I7jC3cj3QLRiyhgl98b"


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        (SLACK, ["T1JJ3T3L2", "A1BRTD4JD", "TIiajkdnlazkcOXrIdevi7FQ"]),
        (JSON, ["hunter2", "w3bh00k", "q%2Fuery1", "q/uery1"]),
        (MAIL, ["pa ss", "pa%20ss", "pa+ss", "team@example.com"]),
        (PUSHBULLET, ["o.gn5kj6nfhv736I7jC3cj3QLRiyhgl98b"]),
        ("tgram://123456789:abcdefg_hij/12315544", ["abcdefg_hij", "123456789", "12315544"]),
        ("json://me:pa/ssword@host.example.com/x", ["ssword"]),
        ('json://me:quo"ted@127.0.0.1', ['quo"ted', 'quo\\"ted']),
    ],
)
def test_every_part_of_a_known_url_is_hidden(url: str, secrets: list[str]) -> None:
    redactor = Redactor([url])
    assert redactor.text(f"refused by {url} again") == "refused by *** again"
    for secret in secrets:
        for spelt in (secret, secret.upper()):
            assert redactor.text(f"before{spelt}after") == "before***after"


def test_what_is_no_secret_stays_readable() -> None:
    redactor = Redactor([JSON, MAIL])
    text = "no answer from 127.0.0.1:8080 or mail.example.com as text: error=500."
    assert redactor.text(text) == text
    assert Redactor().text("plain words, 1:2 and a=b") == "plain words, 1:2 and a=b"
    assert "me" in redactor.text("time")  # a user of two letters would be found everywhere


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("at postgres://joe:pw@db/x, retry", "at postgres://*** retry"),
        ("GET https://joe:pw@host.com:1/a?b=c", "GET https://***@host.com:1/a?***"),
        ('("slack://A/B/C")', '("slack://***")'),
        ("see https://docs.example.com/guide/start", "see https://docs.example.com/guide/start"),
        (
            "https://hooks.slack.com/services/T1/B1/TIiajkdnlazkcOXrIdevi7FQ failed",
            "https://hooks.slack.com/services/T1/B1/*** failed",
        ),
        ("https://api.telegram.org/bot123:AAabcdefghijkl_mnop/x", "https://api.telegram.org/***/x"),
        ("init tcp://10.0.0.1:29500 and s3://bucket/key", None),
        ("api_key=abc, next", "api_key=***, next"),
        ("WANDB_API_KEY: 'abc'", "WANDB_API_KEY: '***'"),
        ('{"password": "a b"}', '{"password": "***"}'),
        ("Authorization: Bearer abc.def-ghi", "Authorization: ***"),
        ("sent Basic dXNlcjpwYXNz", "sent ***"),
        ("--token=abc --tokens-per-step=4096", "--token=*** --tokens-per-step=4096"),
        ("tokens_per_second: 12", None),
        ("s3 https://b.s3.aws.com/x?X-Amz-Signature=ab&a=1", "s3 https://b.s3.aws.com/x?***"),
        ("X-Amz-Signature=abc; sig=abc&x", "X-Amz-Signature=***; sig=***&x"),
        ("got eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.SflKxwRJ_x-y back", "got *** back"),
        ("run --wandb-key abc --my.secret=b", "run --wandb-key *** --my.secret=***"),
        ("WANDB_KEY=abc, the key: value", "WANDB_KEY=***, the key: value"),
        ("-http://joe:pw@host/x", "-http://***"),
        ("key xoxb-123456789012-abcdef and hf_abcdefghijkl", "key *** and ***"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, safe: str | None) -> None:
    assert Redactor().text(text) == (text if safe is None else safe)


@pytest.mark.parametrize(
    "part",
    ["a.", "a-", "sk", "eyJ-", "token ", 'token="', "--x-key ", "a_", "http", "/a", "Basic "],
)
def test_time_grows_with_the_length(part: str) -> None:
    """A quadratic pattern would take minutes for a million characters."""
    redactor = Redactor([JSON])
    text = part * (1_000_000 // len(part))
    # Nothing is assigned in the others, so there is nothing to hide.
    assert ("***" in redactor.text(text)) == (part == 'token="')
    assert redactor.text(f"{text}://x=y").endswith("***")


def test_no_variable_is_shown_that_could_hold_a_secret() -> None:
    words = ("KEY", "TOKEN", "SECRET", "PASS", "PWD", "URL", "AUTH", "CREDENTIAL", "JWT", "COOKIE")
    named = {name for name in SHOWN_VARIABLES if any(word in name for word in words)}
    assert named == {"TOKENIZERS_PARALLELISM"}


def test_environment_and_command_line() -> None:
    redactor = Redactor([JSON])
    environ = {
        "WANDB_API_KEY": "abc",
        "DISTMON_NOTIFY__URLS": "slack://a",
        "NCCL_DEBUG": "INFO",
        "DISTMON_RUN_DIR": "/runs/w3bh00k",
        "HF_ENDPOINT": "https://joe:pw@hub",
        "SLURM_JWT": "abc",
        "NCCL_DEBUG_TOKEN": "abc",
    }
    allowed = ("NCCL_DEBUG", "DISTMON_RUN_DIR", "HF_ENDPOINT", "RANK")
    assert redactor.variables(environ, allowed) == {
        "NCCL_DEBUG": "INFO",
        "DISTMON_RUN_DIR": "/runs/***",
        "HF_ENDPOINT": "https://***@hub",
    }
    argv = ["--wandb-key", "abc", "--key=abc", "--store-password", "abc", "-mysecret", "abc"]
    assert redactor.arguments(argv) == (
        ["--wandb-key", "***", "--key=***", "--store-password", "***", "-mysecret", "***"]
    )
    argv = ["train.py", "--api-key", "abc", "--lr", "1", "--hub-token=abc", JSON, "--password"]
    assert redactor.arguments(argv) == (
        ["train.py", "--api-key", "***", "--lr", "1", "--hub-token=***", "***", "--password"]
    )


def test_the_error_of_a_sink_is_logged_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Sink:
        raise OSError("no route to postgres://joe:hunter2@db with api_key=k3y")

    delivery = Delivery([("db", fail)], queue_size=1)
    with caplog.at_level(logging.WARNING, "distmon"):
        delivery.post_alert(Alert("frozen", "warning", 1, "it is frozen"))
        delivery.close()
    assert "OSError: no route to postgres://*** with api_key=***" in caplog.text


@pytest.mark.parametrize(
    "values",
    [
        {"notify": "hunter2"},
        {"notify": {"urls": {"slack": "hunter2"}}},
        {"notify": {"urls": ["json://ok", ["hunter2"]]}},
        {"notify": {"url": "hunter2"}},
        {"notify": {"slack://hunter2/x": ""}},
        {"notify": {"severity": "hunter2"}},
        {"sinks": ["slack://hunter2"]},
    ],
)
def test_mistakes_in_the_config_are_told_without_secrets(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(values, environ={})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValidationError) as raw:
        MonitorConfig(**values)
    assert "hunter2" not in str(raw.value).replace("notify.slack://hunter2/x", "")


def test_a_variable_that_is_no_yaml_is_named_without_its_value() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={"DISTMON_NOTIFY__URLS": "slack://hunter2: ["})
    assert str(caught.value) == (
        "the environment variable DISTMON_NOTIFY__URLS does not hold a valid YAML value"
    )
