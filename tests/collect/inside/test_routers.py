"""Routers of several libraries: found without a word, and counted as they count themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distmon
from distmon import Record
from distmon.errors import ConfigError


def record_of(model: nn.Module, x: torch.Tensor, folder: Path, **settings: Any) -> Record:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"run_dir": folder, "sinks": [], "interval": 1, "inside": "experts"}
    with distmon.attach(model, optimizer, **(options | settings)) as monitor:
        output = model(x)
        output = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
        output.float().square().mean().backward()
        optimizer.step()
        monitor.step()
        record = monitor.last_record
    assert record is not None
    assert record.faults == ()
    return record


def expected(loads: torch.Tensor) -> dict[str, float]:
    share = loads.double() / loads.sum()
    entropy = -torch.special.xlogy(share, share).sum()
    return {
        "load_max": float(share.max()) * len(share),
        "diversity": float(entropy.exp()) / len(share),
        "dead_fraction": float((loads == 0).double().mean()),
    }


def assert_row(row: dict[str, float], want: dict[str, float]) -> None:
    assert {key: row[key] for key in want} == pytest.approx(want, rel=1e-9)


class Moe(nn.Module):
    """A plain linear gate; the block chooses."""

    def __init__(self, experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(16, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(experts))
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, indices = self.gate(x).softmax(-1).topk(self.top_k)
        self.chosen = indices
        output = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            weight = (values * (indices == i)).sum(-1, keepdim=True)
            output = output + weight * expert(x)
        return output


def test_an_error_of_the_hook_does_not_reach_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("planted")

    monkeypatch.setattr("distmon.collect.inside.tables.Watching.counts", fail)
    model = nn.Sequential(Moe(), Moe())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings: dict[str, Any] = {"run_dir": tmp_path, "sinks": [], "interval": 1}
    with distmon.attach(model, optimizer, inside="experts", **settings) as monitor:
        model(torch.randn(4, 32, 16)).square().mean().backward()
        optimizer.step()
        monitor.step()
    for router in model:
        assert isinstance(router, Moe)
        assert router.gate.weight.grad is not None  # its forward pass was not cut short


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_router_of_a_compiled_model_is_counted_in_one_graph(
    backend: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(Moe(), Moe())
    x = torch.randn(4, 32, 16)
    want = record_of(model, x, tmp_path / "eager").inside["experts"]
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    found = record_of(compiled, x, tmp_path / "compiled").inside["experts"]
    assert [name.removeprefix("_orig_mod.") for name in found.names] == [*want.names]
    for column, values in want.columns.items():
        np.testing.assert_allclose(found.columns[column], values, rtol=1e-9)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_a_gate_that_returns_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Moe(), Moe())
    record = record_of(model, torch.randn(4, 32, 16), tmp_path)
    table = record.inside["experts"]
    assert table.names == ("0.gate", "1.gate")
    for i, moe in enumerate(model):
        loads = moe.chosen.flatten().bincount(minlength=8)
        row = table.row(f"{i}.gate")
        assert_row(row, expected(loads))
        assert row["experts_per_token"] == 2
        assert row["dropped_fraction"] == 0


def test_mixtral_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        vocab_size=50,
    )
    model = transformers.MixtralForCausalLM(config)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(
                lambda _m, _a, out, name=name: seen.update({name: out[2].detach()})
            )
    x = torch.randint(0, 50, (2, 24))
    record = record_of(model.train(), x, tmp_path, inside=["experts", "attention"])
    table = record.inside["experts"]
    assert set(table.names) == set(seen)
    for name, indices in seen.items():
        assert_row(table.row(name), expected(indices.flatten().bincount(minlength=4)))
        assert table.row(name)["experts_per_token"] == 2
    assert len(record.inside["attention"].names) == 2


def test_a_router_of_torchtitan(tmp_path: Path) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 6, bias=False)
            self.num_experts, self.top_k = 6, 3

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores, indices = self.gate(x).sigmoid().topk(3)
            counts = torch.histc(indices.view(-1).float(), bins=6, min=0, max=6)
            return scores, indices, counts

    class TitanMoe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ParameterDict({"w1": nn.Parameter(torch.randn(6, 16, 16))})
            self.router = Router()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores, indices, self.counts = self.router(x)
            return torch.einsum("tk,tkio,ti->to", scores, self.experts["w1"][indices], x)

    torch.manual_seed(0)
    model = nn.Sequential(TitanMoe())
    record = record_of(model, torch.randn(40, 16), tmp_path)
    table = record.inside["experts"]
    assert table.names == ("0.router",)
    assert_row(table.row("0.router"), expected(model[0].counts))


def test_the_gate_of_deepspeed_counts_dropped_tokens(tmp_path: Path) -> None:
    """The gate itself: the layer around it needs a process group of experts."""
    moe = pytest.importorskip("deepspeed.moe.sharded_moe")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = moe.TopKGate(16, 4, k=1, capacity_factor=0.5, min_capacity=1)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.loss, weights, self.mask, self.counts = self.gate(x)
            return torch.einsum("sec,sm->ecm", weights.float(), x) + self.loss

    torch.manual_seed(0)
    model = nn.Sequential(Layer())
    record = record_of(model, torch.randn(40, 16), tmp_path)
    row = record.inside["experts"].row("0.gate")
    counts = model[0].counts
    assert_row(row, expected(counts))
    kept = int(model[0].mask.sum())
    assert 0 < kept < 40
    assert row["dropped_fraction"] == pytest.approx(1 - kept / int(counts.sum()))
    assert np.isfinite(row["fair_tokens"])


def test_a_glob_that_matches_no_router(tmp_path: Path) -> None:
    model = nn.Sequential(Moe())
    with pytest.raises(ConfigError, match="matches nothing"):
        record_of(model, torch.randn(8, 16), tmp_path, inside={"kinds": "all", "routers": "x.*"})
