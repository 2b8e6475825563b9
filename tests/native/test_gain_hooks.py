"""Compiled hooks of gradients against hooks of Python."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import quiet
from torch.utils.checkpoint import checkpoint

import distmon
from distmon.native import GainHooks, NativeModule

Gradients = list[tuple[tuple[int, ...], list[tuple[int, int]]]]


@pytest.fixture
def fallback() -> Gradients:
    """Gradients that were left to Python."""
    return []


@pytest.fixture
def hooks(native: NativeModule, fallback: Gradients) -> GainHooks:
    made = native.gain_hooks(2, lambda g, ends: fallback.append((tuple(g.shape), ends)))
    made.arm(True)
    return made


def read(hooks: GainHooks) -> list[list[list[float]]]:
    out = np.full((2, 2, 2), np.nan)
    hooks.read(out)
    found: list[list[list[float]]] = out.tolist()
    return found


def seen_by_python(run: Callable[[Callable[[torch.Tensor], Any]], torch.Tensor]) -> list[float]:
    norms: list[float] = []
    run(lambda x: x.register_hook(lambda g: norms.append(float(g.norm())))).backward()
    return norms


def _in_place(hook: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    x = torch.arange(6.0, requires_grad=True) * 2
    hook(x)
    x.mul_(3)
    hook(x)
    return (x * x).sum()


def _checkpointed(hook: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    x = torch.arange(6.0, requires_grad=True) * 2
    hook(x)
    out: torch.Tensor = checkpoint(lambda y: (y * y).sin(), x, use_reentrant=False)
    return (out * out).sum()


def _bf16(hook: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    x = torch.arange(6.0, dtype=torch.bfloat16, requires_grad=True) * 2
    hook(x)
    return (x * x).sum()


@pytest.mark.parametrize("run", [_in_place, _checkpointed, _bf16])
def test_norms_are_those_that_python_hooks_see(
    run: Callable[[Callable[[torch.Tensor], Any]], torch.Tensor], hooks: GainHooks
) -> None:
    expected = seen_by_python(run)
    run(lambda x: hooks.hook(x, 1, 0)).backward()
    norm, count = read(hooks)[1][0]
    assert count == len(expected)
    assert norm == pytest.approx(np.hypot.reduce(expected), rel=1e-2 if run is _bf16 else 1e-6)


def test_one_norm_for_both_ends_of_a_tensor(hooks: GainHooks) -> None:
    x = torch.ones(4, requires_grad=True) * 1.0
    assert hooks.hook(x, 0, 1)
    assert hooks.hook(x, 1, 0)
    assert hooks.hook(x, 1, 0)  # a checkpointed block is called twice
    (x * 3).square().sum().backward()
    (_, out), (into, _) = read(hooks)
    assert out == into == [36.0, 1.0]
    hooks.arm(False)
    (torch.ones(3, requires_grad=True) * 1).sum().backward()
    hooks.clear()
    assert not np.any(read(hooks))


def test_what_is_not_plain_memory_is_left_to_python(hooks: GainHooks, fallback: Gradients) -> None:
    x = torch.ones(2, 3, requires_grad=True) * 1.0
    assert hooks.hook(x, 0, 1)
    x.sum().backward()  # one number for all elements
    assert fallback == [((2, 3), [(0, 1)])]
    assert not np.any(read(hooks))
    for odd in (
        torch.ones(2),
        torch.ones(2).to_sparse().requires_grad_(),
        torch.ones(2, device="meta", requires_grad=True),
        "no tensor",
    ):
        assert hooks.hook(odd, 0, 0) is False  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        hooks.hook(x, 2, 0)


def test_a_graph_may_outlive_the_hooks(native: NativeModule) -> None:
    class Holder:
        def __call__(self, *_: object) -> None:
            raise AssertionError("called")

    holder = Holder()
    gone = weakref.ref(holder)
    made = native.gain_hooks(1, holder)
    made.arm(True)
    x = torch.ones(3, requires_grad=True) * 1.0
    made.hook(x, 0, 0)
    del made, holder
    gc.collect()
    assert gone() is None
    (x * x).sum().backward()


def test_hooks_of_the_user_on_a_leaf_stay(hooks: GainHooks, tmp_path: Path) -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert hooks.hook(leaf, 0, 0) is False, "a leaf is left to Python"

    class Queries(torch.nn.Module):
        """Blocks whose input is a parameter that a hook keeps as it is."""

        def __init__(self) -> None:
            super().__init__()
            self.queries = torch.nn.Parameter(torch.ones(4, 8))
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self) -> torch.Tensor:
            x = self.queries
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    model = Queries()
    model.queries.register_hook(lambda g: g * 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmon.attach(
        model, optimizer, **quiet(tmp_path, flow={"blocks": ["blocks.*"]})
    ) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        assert monitor.last_record is not None
        table = monitor.last_record.gradient_gain
        assert table is not None
        assert len(table.blocks) == 3
    assert torch.equal(model.queries, torch.ones(4, 8))


def test_a_tensor_that_lives_on_is_counted_once_in_each_step(hooks: GainHooks) -> None:
    features = torch.ones(4, requires_grad=True) * 1.0
    for _ in range(3):
        hooks.clear()
        hooks.hook(features, 0, 0)
        (features * 3).square().sum().backward(retain_graph=True)
        assert read(hooks)[0][0] == [36.0, 1.0]
    hooks.clear()  # this step does not call a block with it
    (features * 3).square().sum().backward()
    assert not np.any(read(hooks))


def test_a_compiled_backward_pass_runs(hooks: GainHooks) -> None:
    x = torch.ones(4, requires_grad=True)
    y = x * 2.0
    assert hooks.hook(y, 0, 0)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        (y * y).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 8.0))


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_what_a_signal_handler_raises_is_raised(
    native: NativeModule, raised: type[BaseException]
) -> None:
    def interrupted(*_: object) -> None:
        raise raised(7)  # as if the signal had come while Python adds the gradient

    hooks = native.gain_hooks(1, interrupted)
    hooks.arm(True)
    x = torch.ones(2, 3, requires_grad=True) * 1.0
    hooks.hook(x, 0, 0)

    def train() -> None:
        x.sum().backward()
        for _ in range(1000):
            len("python runs")

    with pytest.raises(raised) as found:
        train()
    assert found.value.args == (7,)


def test_what_is_sent_is_written_to_the_rows_of_the_blocks(hooks: GainHooks) -> None:
    for block, size in ((0, 6), (1, 3)):
        x = torch.arange(float(size), requires_grad=True) * 2
        hooks.hook(x, block, 0)
        y = x * 3
        hooks.hook(y, block, 1)
        (y * y).sum().backward()
    cells = np.array(read(hooks))
    table = torch.full((4, 5), torch.nan, dtype=torch.float64)
    assert hooks.put(table.flatten(), np.array([2, 1]))
    assert not table[[0, 3]].any()
    for row, (before, after) in zip((2, 1), cells, strict=True):
        expected = [before[0] ** 2, before[1], after[0] ** 2, after[1], 1.0]
        assert table[row].tolist() == expected
    assert not hooks.put(torch.zeros(20), np.array([2, 1]))  # float32
    for rows in ([4, 0], [-1, 0]):
        with pytest.raises(IndexError, match="no such row"):
            hooks.put(table.flatten(), np.array(rows))
    with pytest.raises(ValueError, match="2 items"):
        hooks.put(table.flatten(), np.array([0]))
