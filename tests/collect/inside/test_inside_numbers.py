"""Numbers of one process against float64 references, and what must not change them."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distmon
from distmon import Record
from distmon.collect.inside.activation_rows import UNBOUNDED, add_activation
from distmon.collect.inside.catalog import Catalog
from distmon.collect.inside.tables import Tables
from distmon.layout.units import LocalActivation
from distmon.verify.expected_inside import (
    activation_statistics,
    attention_logits,
    attention_statistics,
    dead_fraction,
)


class Net(nn.Module):
    """Blocks with an activation module, a function in the code, and attention."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 8)
        self.mix = Mix()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.act(3 * self.up(x)))) + self.mix(x)


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (3 * self.q(x), self.k(x), x))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step))


def record_of(model: nn.Module, folder: Path, passes: int = 1, **settings: Any) -> Record:
    """Train one step of `passes` micro-batches, with an evaluation before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"run_dir": folder, "sinks": [], "interval": 1, "inside": "all"}
    with distmon.attach(model, optimizer, **(options | settings)) as monitor:
        for mode in (False, True):  # evaluations, in one of which training mode was left on
            model.train(mode)
            with torch.no_grad():
                model(1e3 * data(9))
        for step in range(passes):
            model(data(step)).square().mean().backward()
        optimizer.step()
        monitor.step()
        record = monitor.last_record
    assert record is not None
    assert record.faults == ()
    return record


def reference(passes: int = 1) -> dict[str, dict[str, float]]:
    """The activations in float64, by plain hooks."""
    torch.manual_seed(0)
    model = Net().double()
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith(("act", "blocks.0", "blocks.1")):
            module.register_forward_hook(
                lambda _m, _a, out, name=name: seen.setdefault(name, []).append(out.detach())
            )
    for step in range(passes):
        model(data(step).double())
    for name in list(seen):
        if name.endswith("act"):
            seen[f"{name.removesuffix('.act')}:relu"] = [x.relu() for x in seen[name]]
    return {name: statistics(torch.cat([x.flatten(0, 1) for x in xs])) for name, xs in seen.items()}


def statistics(x: torch.Tensor) -> dict[str, float]:
    found = activation_statistics(x)
    del found["saturated_fraction"]
    found["norm"] = found["rms"] * x.shape[1] ** 0.5
    return {**found, "dead_fraction": dead_fraction([x]), "positions": len(x)}


def assert_rows(record: Record, expected: dict[str, dict[str, float]]) -> None:
    table = record.inside["activations"]
    for name, row in expected.items():
        for column, value in row.items():
            # float32 against float64: some roundings of values around 1.
            assert table.row(name)[column] == pytest.approx(value, rel=2e-5, abs=2e-6), (
                name,
                column,
            )


@pytest.mark.parametrize("passes", [1, 3])
def test_activations(passes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    record = record_of(Net(), tmp_path, passes)
    assert_rows(record, reference(passes))
    tanh = record.inside["activations"].row("blocks.1.act")
    assert 0 < tanh["saturated_fraction"] < 1
    assert np.isnan(record.inside["activations"].row("blocks.0")["saturated_fraction"])


def test_gates_of_a_recurrent_cell_are_not_saturated(tmp_path: Path) -> None:
    """They are open or closed: that is no loss of gradient."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.Linear(16, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = cell = x.new_zeros(len(x), 8)
            for step in x.unbind(1):
                i, f, g, o = self.gates(20 * torch.cat([step, hidden], 1)).chunk(4, 1)
                cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
                hidden = torch.sigmoid(o) * torch.tanh(cell)
            return hidden

    table = record_of(Gated(), tmp_path).inside["activations"]
    assert "(model):tanh" in table.names
    assert np.isnan(table.columns["saturated_fraction"]).all()


def test_a_checkpointed_block_counts_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert_rows(record_of(Net(checkpointed=True), tmp_path), reference())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_measured_in_one_graph(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model: Any = torch.compile(Net(), backend=backend, fullgraph=True)
    record = record_of(model, tmp_path)
    expected = {n: row for n, row in reference().items() if ":" not in n}  # functions are inside
    assert_rows(record, expected)
    assert caplog.text.count("attention and functions such as F.relu are not measured") == 1
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_attention_is_that_of_all_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    found = record_of(model, tmp_path).inside["attention"].row("blocks.0.mix")
    mix = copy.deepcopy(model.blocks[0].mix).double()
    x = data().double()
    q, k = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (3 * mix.q(x), mix.k(x)))
    want = attention_statistics([attention_logits(q, k, is_causal=True)])
    for column, value in want.items():
        assert found[column] == pytest.approx(value, rel=1e-5), column


@pytest.mark.parametrize("weights", [True, False])
def test_attention_of_torch_and_of_a_softmax_agree(weights: bool, tmp_path: Path) -> None:
    """`need_weights` makes torch compute the softmax itself."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x, 5 * x, x, need_weights=weights)[0]

    torch.manual_seed(0)
    model = Attending()
    found = record_of(model, tmp_path).inside["attention"].row("inner")
    inner, x = copy.deepcopy(model.inner).double(), data().double()
    q, k, _ = (
        x2 @ w.T + b
        for x2, w, b in zip(
            (x, 5 * x, x), inner.in_proj_weight.chunk(3), inner.in_proj_bias.chunk(3), strict=True
        )
    )
    q, k = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k))
    assert found["logit_max"] == pytest.approx(float((q @ k.mT / 2).max()), rel=1e-5)


def test_effective_rank_and_spread_are_unbiased() -> None:
    """Estimates of small samples average to the truth over all positions."""
    torch.manual_seed(0)
    scales = torch.tensor([3.0, 2.0, 1.0, *[0.1] * 13])
    x = torch.randn(20_000, 16) * scales + 1.0
    tables = Tables(Catalog(activations=("x",)), torch.device("cpu"))
    sums, maxima = tables.activation(0)
    for part in x.split(200):
        add_activation(LocalActivation(part, 1, 0, 16), sums, maxima, UNBOUNDED)
    covariance = torch.cov(x.double().T)
    _, trace, trace_square, square_trace, sampled = sums[6:].tolist()
    rank = covariance.trace() ** 2 / covariance.square().sum()
    assert trace_square / square_trace == pytest.approx(float(rank), rel=0.1)
    spread = covariance.trace() / x.double().square().sum(1).mean()
    assert trace / sampled == pytest.approx(float(spread), rel=0.03)


def test_copies_of_the_model_have_no_hooks_of_the_monitor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"run_dir": tmp_path, "sinks": [], "interval": 1, "inside": "all"}
    with distmon.attach(model, optimizer, **options) as monitor:
        file = io.BytesIO()
        torch.save(model, file)
        twin = copy.deepcopy(model)
        for each in (model, twin, model):
            each(data()).square().mean().backward()
        optimizer.step()
        monitor.step()
        table = monitor.last_record.inside["activations"]
        assert table.row("blocks.0")["positions"] == 2 * 12
    assert not any(m._forward_hooks for m in model.modules())


def test_nothing_is_measured_between_observations_or_by_default(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"run_dir": tmp_path, "sinks": [], "interval": 2}
    with distmon.attach(model, optimizer, inside={"kinds": ["activations"], "every": 2}, **options):
        pass
    with distmon.attach(model, optimizer, **options) as monitor:
        assert monitor.cycle.observer.inside.catalog == Catalog()
    settings = {"kinds": "all", "every": 2}
    with distmon.attach(model, optimizer, inside=settings, **options) as monitor:
        seen = []
        for _ in range(8):
            model(data()).square().mean().backward()
            optimizer.step()
            monitor.step()
            record = monitor.last_record
            if record is not None and record.step % 2 == 0 and record.step not in dict(seen):
                seen.append((record.step, "activations" in record.inside))
        assert seen == [(2, True), (4, False), (6, True), (8, False)]
