"""Odd values in every public method: nothing reaches the training loop, later records are right."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from small_runs import batch, quiet, small_model

import distmon
from distmon.config import MonitorConfig, load_config
from distmon.errors import ConfigError


class _NoNumber:
    """Raises whatever is asked of it."""

    def __float__(self) -> float:
        raise OverflowError("no number")

    __int__ = __index__ = __bool__ = __len__ = __iter__ = __float__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "a number that is none"


ODD: list[Any] = [
    *(None, "", "1e9999", b"\0", [], [1, [2]], {}, {"a": 1}, (), object(), _NoNumber(), 1j, True),
    *(10**400, -(10**400), -1, 0, 2**63, 1e308, -0.0, math.inf, -math.inf, math.nan),
    *(torch.tensor([]), torch.tensor([1.0, 2.0]), torch.tensor(1j), torch.tensor(True)),
    *(torch.tensor(3, dtype=torch.int64), torch.empty(2, device="meta"), torch.tensor([[7.0]])),
    *(torch.nn.Linear(1, 1), float, lambda: 1, "\ud800", "x" * 100_000),
]
SLOTS = ("loss", "tokens", "samples", "lr", "grad_norm", "step")
odd = st.sampled_from(ODD)


def _call_of(method: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(method), st.fixed_dictionaries(arguments))


CALLS = st.one_of(
    st.tuples(st.just("step"), st.dictionaries(st.sampled_from(SLOTS), odd)),
    st.tuples(st.just("check"), st.dictionaries(st.sampled_from(SLOTS[::4]), odd)),
    st.tuples(
        st.just("evaluated"),
        st.fixed_dictionaries({"val_loss": odd}, optional={"train_loss": odd, "epoch": odd}),
    ),
    _call_of("task_losses", losses=st.one_of(odd, st.dictionaries(st.sampled_from("ab"), odd))),
    _call_of("phase", name=odd),
    _call_of("before_step", optimizer=odd),
    _call_of("after_step", optimizer=odd),
    _call_of("load_state_dict", state=odd),
    _call_of(
        "load_state_dict",
        state=st.fixed_dictionaries(
            {"version": st.sampled_from([1, 2, 99])},
            optional=dict.fromkeys(("schedule", "cost", "cycle", "finite_watch", "step"), odd),
        ),
    ),
    _call_of("state_dict"),
    _call_of("last_record"),
)


def _call(monitor: Any, name: str, arguments: dict[str, Any]) -> None:
    if name == "phase":
        with monitor.phase(arguments["name"]):
            pass
    elif name == "last_record":
        _ = monitor.last_record
    else:
        getattr(monitor, name)(**arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    logging.getLogger("distmon").setLevel(logging.CRITICAL)
    model = small_model(width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    folder = quiet(tmp_path_factory.mktemp("odd"), sinks=["jsonl"])
    with distmon.attach(model, optimizer, **folder) as monitor:
        yield model, optimizer, monitor
    logging.getLogger("distmon").setLevel(logging.NOTSET)


def _train(run: Any, step: int, tokens: int) -> tuple[float, float]:
    """Train one step as usual; its loss and gradient norm."""
    model, optimizer, monitor = run
    optimizer.zero_grad()
    loss = model(batch(step)).square().mean()
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    optimizer.step()
    monitor.step(loss=loss, tokens=tokens)
    return float(loss), norm


@settings(max_examples=250, deadline=None, derandomize=True)
@given(calls=st.lists(CALLS, min_size=6, max_size=24))
def test_nothing_reaches_the_loop_and_the_next_record_is_right(calls: Any, run: Any) -> None:
    monitor = run[2]
    for name, arguments in calls:
        _call(monitor, name, arguments)
    assert not monitor.closed
    before = monitor.schedule.completed
    _train(run, 1, tokens=3)  # the odd values of this step go with its record
    loss, norm = _train(run, 2, tokens=5)
    record = monitor.last_record
    assert record is not None
    assert record.step == before + 2
    assert record.applied
    assert not record.faults
    metrics = record.metrics
    assert metrics["monitor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["train/step_loss"] == pytest.approx(loss, rel=1e-6)
    assert dict(record.losses) == {record.step: pytest.approx(loss, rel=1e-6)}
    assert record.ranks["tokens"].tolist() == [5]


def test_a_config_with_odd_values_is_read_or_refused_in_one_sentence() -> None:
    """Every key of the config, and every key of its sections, with every odd value."""
    sections = {
        name: field.annotation.model_fields
        for name, field in MonitorConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    places = [(name,) for name in MonitorConfig.model_fields]
    places += [(name, key) for name, fields in sections.items() for key in fields]
    for place in places:
        for value in ODD:
            given = value
            for key in reversed(place):
                given = {key: given}
            sentence = _refusal(given)
            assert "\n" not in sentence
            assert not sentence or place[0] in sentence
    assert len(places) * len(ODD) > 2000


def _refusal(config: Any) -> str:
    """Why the config is refused; empty when it is read. Any other error fails the test."""
    try:
        load_config(config, environ={})
    except ConfigError as refused:
        return str(refused)
    return ""


def test_a_state_that_is_odd_is_a_fresh_start(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=3)) as monitor:
        for value in ODD:
            monitor.load_state_dict(value)
            assert monitor.schedule.completed == 0
            assert monitor.schedule.next_observation == 3
