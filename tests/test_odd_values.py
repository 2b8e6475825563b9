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
from small_runs import batch, quiet, small_model

import distmon


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
CALLS = st.one_of(
    st.tuples(st.just("step"), st.dictionaries(st.sampled_from(SLOTS), odd)),
    st.tuples(st.just("check"), st.dictionaries(st.sampled_from(SLOTS[::4]), odd)),
    st.tuples(
        st.just("evaluated"),
        st.fixed_dictionaries({"val_loss": odd}, optional={"train_loss": odd, "epoch": odd}),
    ),
    st.tuples(st.just("task_losses"), st.fixed_dictionaries({"losses": odd})),
    st.tuples(st.just("phase"), st.fixed_dictionaries({"name": odd})),
    st.tuples(st.just("before_step"), st.fixed_dictionaries({"optimizer": odd})),
    st.tuples(st.just("after_step"), st.fixed_dictionaries({"optimizer": odd})),
    st.tuples(
        st.just("load_state_dict"),
        st.fixed_dictionaries(
            {
                "state": st.one_of(
                    odd,
                    st.fixed_dictionaries(
                        {"version": st.sampled_from([1, 2, 99])},
                        optional=dict.fromkeys(("schedule", "cost", "cycle", "step"), odd),
                    ),
                )
            }
        ),
    ),
)


def _call(monitor: Any, name: str, arguments: dict[str, Any]) -> None:
    if name == "phase":
        with monitor.phase(arguments["name"]):
            pass
    else:
        getattr(monitor, name)(**arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    logging.getLogger("distmon").setLevel(logging.CRITICAL)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    folder = quiet(tmp_path_factory.mktemp("odd"), sinks=["jsonl"])
    with distmon.attach(model, optimizer, **folder) as monitor:
        yield model, optimizer, monitor
    logging.getLogger("distmon").setLevel(logging.NOTSET)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(calls=st.lists(CALLS, min_size=4, max_size=12))
def test_nothing_reaches_the_loop_and_the_next_record_is_right(calls: Any, run: Any) -> None:
    model, optimizer, monitor = run
    for name, arguments in calls:
        _call(monitor, name, arguments)
    assert not monitor.closed
    monitor.state_dict()
    optimizer.zero_grad()
    loss = model(batch(1)).square().mean()
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    optimizer.step()
    monitor.step(loss=loss)
    monitor.step(loss=loss)  # a step number that was odd may have moved the next observation
    record = monitor.last_record
    assert record is not None
    if record.applied and "monitor/grad_norm" in record.metrics:
        assert record.metrics["monitor/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_state_that_is_odd_is_a_fresh_start(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=3)) as monitor:
        for value in ODD:
            monitor.load_state_dict(value)
            assert monitor.schedule.completed == 0
            assert monitor.schedule.next_observation == 3
