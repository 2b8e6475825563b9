"""Gains inside of compiled graphs are those of eager mode, and training goes on as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from gain_models import Checkpointed, Net, ResidualOutside, data, gains_by_autograd, loss_of

import distmon

BACKEND = "aot_eager"
"""Traces and cuts the graphs as inductor does and writes no C++."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _wrapped(model: Net) -> Any:
    return torch.compile(model, fullgraph=True, backend=BACKEND)


def _in_place(model: Net) -> Any:
    model.compile(fullgraph=True, backend=BACKEND)
    return model


def _blocks(model: Net) -> Any:
    for block in model.blocks:
        block.compile(fullgraph=True, backend=BACKEND)
    return model


def _settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"run_dir": folder / "run", "sinks": [], "interval": 3, **more}


@pytest.mark.parametrize(
    ("kind", "compiled", "when"),
    [
        (Net, _wrapped, "before"),
        (ResidualOutside, _in_place, "after"),
        (Checkpointed, _wrapped, "after"),
        (Checkpointed, _blocks, "before"),
    ],
)
def test_gains_are_those_of_autograd(
    kind: type[Net], compiled: Callable[[Net], Any], when: str, tmp_path: Path
) -> None:
    """Compiled before the monitor is attached, or after; two batches, then their backwards."""
    model, reference = kind(2), (Net if kind is Checkpointed else kind)(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward = compiled(model) if when == "before" else model
    with distmon.attach(forward, optimizer, **_settings(tmp_path)) as monitor:
        forward = compiled(model) if when == "after" else forward
        for step in range(1, 7):
            reference.load_state_dict(model.state_dict())
            expected = gains_by_autograd(reference, data(step), 3 * data(step))
            optimizer.zero_grad()
            first, second = (loss_of(forward, scale * data(step)) for scale in (1, 3))
            ((first + second) / 2).backward()
            optimizer.step()
            monitor.step(loss=first)
            if step == 3:
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            if step % 3 == 0:
                record = monitor.last_record
                assert record is not None
                assert record.step == step
                assert record.gradient_gain is not None
                assert record.gradient_gain.blocks == ("blocks.0", "blocks.1")
                assert record.gradient_gain.gain == pytest.approx(expected, rel=1e-5)
        # Observed steps are no reason to compile again.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_an_old_torch_leaves_compiled_graphs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distmon.collect.gradient_gain.block_hooks.operator_library", lambda: None)
    model = Net(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward = _wrapped(model)
    with distmon.attach(forward, optimizer, **_settings(tmp_path, interval=1)) as monitor:
        loss_of(forward, data(1)).backward()
        optimizer.step()
        monitor.step()
        assert monitor.last_record is not None
        assert monitor.last_record.faults == ()
        assert monitor.last_record.gradient_gain is None
