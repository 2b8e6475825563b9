"""Where tensors lie: the fast look at parameters finds what a look at each shard finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from csrc_triton.address_layout import ADDRESS
from distmon.layout.plain import plain_shard
from distmon.probe.address_table import AddressTable
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading

CPU = torch.device("cpu")


def _tables(parameters: list[torch.nn.Parameter]) -> tuple[AddressTable, AddressTable]:
    shards = [plain_shard(f"p{i}", p) for i, p in enumerate(parameters)]
    plan = build_plan(shards, Reading(64), 0, CPU)
    rows: list[torch.Tensor | None] = [None] * len(shards)
    for chunk in plan.chunks:
        for k, row in enumerate(chunk.rows):
            rows[row] = chunk.offsets[k]
    slow = [replace(shard, paths=None) for shard in shards]
    return AddressTable(shards, rows, None), AddressTable(slow, rows, None)


def _grad(kind: str, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    if kind == "none":
        return None
    if kind == "sparse":
        return torch.sparse_coo_tensor([[0]], torch.ones(1, parameter.shape[1]), parameter.shape)
    if kind == "strided":
        return torch.ones(parameter.shape[::-1]).t()
    return torch.ones_like(parameter)


@pytest.mark.parametrize("kinds", ["plain", "none", "sparse", "strided"])
def test_backends_agree_while_gradients_change(kinds: str) -> None:
    parameters = [torch.nn.Parameter(torch.randn(12, 10)) for _ in range(4)]
    fast, slow = _tables(parameters)
    for step in range(4):
        for i, parameter in enumerate(parameters):
            parameter.grad = _grad(kinds if (i + step) % 3 == 0 else "plain", parameter)
        if step == 2:
            parameters[1].data = torch.randn(12, 10)
        for table in (fast, slow):
            table.refresh(grads=False)
            table.refresh(grads=True)
        columns = [i for name, i in ADDRESS.items() if name in ("weight", "grad")]
        for first in columns:
            assert torch.equal(fast.table[:, first : first + 2], slow.table[:, first : first + 2])
        assert fast.strided["grad"].keys() == slow.strided["grad"].keys()
        for i, parameter in enumerate(parameters):
            grad = parameter.grad
            dense = grad is not None and grad.layout is torch.strided
            assert fast.table[i, ADDRESS["grad"]] == (grad.data_ptr() if dense else 0)
            assert fast.table[i, ADDRESS["weight"]] == parameter.data_ptr()


def test_a_refresh_that_was_interrupted_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the table would hold the address of a gradient that was freed since."""
    parameters = [torch.nn.Parameter(torch.randn(12, 10)) for _ in range(2)]
    table, _ = _tables(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    table.refresh(grads=True)
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with monkeypatch.context() as patch:
        patch.setattr(table, "_upload", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            table.refresh(grads=True)
    table.refresh(grads=True)
    found = table.table[:, ADDRESS["grad"]].tolist()
    assert found == [parameter.grad.data_ptr() for parameter in parameters if kept]
