"""The model: names, size, causality, and the parts of training that are plain functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from launch.model import GPT, KIND_COUNT, Attention, Block, Mlp, Shape, TaskLosses, cross_entropy
from launch.optimizer import build_optimizer, learning_rate
from launch.options import Options


def test_parameter_names_and_size() -> None:
    model = GPT(Shape())
    names = [name for name, _ in model.named_parameters()]
    expected = {
        "embed.weight",
        "positions.weight",
        "blocks.0.norm1.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.3.attn.out.weight",
        "blocks.2.mlp.up.weight",
        "blocks.2.mlp.down.weight",
        "norm.bias",
        "head.weight",
    }
    assert expected <= set(names)
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 1e6


def test_tied_head_is_the_embedding() -> None:
    model = GPT(Shape(tied=True))
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_no_output_depends_on_later_bytes() -> None:
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, width=32, heads=2, context=16))
    ids = torch.randint(0, 256, (1, 16))
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(ids), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_rows_of_qkv_are_whole_heads() -> None:
    """Half of the rows computes half of the heads, as tensor parallelism has it."""
    torch.manual_seed(0)
    shape = Shape(width=32, heads=4)
    whole, half = Attention(shape), Attention(shape)
    half.qkv.weight = nn.Parameter(whole.qkv.weight[48:])
    half.out = nn.Identity()
    x = torch.randn(2, 8, 32)
    expected = whole.out(torch.cat([torch.zeros(2, 8, 16), half(x)], -1))
    with torch.no_grad():
        whole.out.weight[:, :16] = 0
    assert torch.allclose(whole(x), expected, atol=1e-6)


def test_untrained_loss_is_that_of_guessing() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (4, 128))
    loss = cross_entropy(GPT(Shape())(ids), ids.roll(-1, 1))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


def test_without_residual_connections_nothing_is_added() -> None:
    torch.manual_seed(0)
    block = Block(Shape(width=32, heads=2, residual=False))
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        block.mlp.down.weight.zero_()
    assert not block(x).any()


def test_relu_is_used() -> None:
    mlp = Mlp(Shape(width=4, heads=2, activation="relu"))
    with torch.no_grad():
        mlp.up.weight.fill_(-1)
        mlp.down.weight.fill_(1)
    assert not mlp(torch.ones(1, 4)).any()
    assert mlp(-torch.ones(1, 4)).tolist() == [[64.0] * 4]


def test_initial_size_and_dtype() -> None:
    model = GPT(Shape(dtype="bfloat16"), init_std=0.5)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert float(model.head.weight.detach().std()) == pytest.approx(0.5, rel=0.02)


def test_two_tasks_share_the_trunk() -> None:
    torch.manual_seed(0)
    text = b"if a1 == (2):\n"
    targets = torch.tensor([list(text)])
    model = GPT(Shape(layers=1, width=32, heads=2, context=32, kinds=KIND_COUNT))
    outputs = model(targets)
    assert outputs.shape == (1, len(text), 256 + KIND_COUNT)
    losses = TaskLosses(3.0)(outputs, targets)
    assert [*losses] == ["byte", "kind"]
    assert torch.equal(losses["byte"], cross_entropy(outputs[..., :256], targets))
    kinds = torch.tensor([[0, 0, 2, 0, 1, 2, 5, 5, 2, 4, 1, 4, 5, 3]])
    assert torch.equal(losses["kind"], 3 * cross_entropy(outputs[..., 256:], kinds))
    assert [*TaskLosses(None)(outputs[..., :256], targets)] == ["byte"]


def test_sgd_has_the_same_groups_and_momentum() -> None:
    model = GPT(Shape(layers=1))
    parameters = dict(model.named_parameters())
    shapes = {name: p.shape for name, p in parameters.items()}
    optimizer = build_optimizer(parameters, shapes, Options(optimizer="sgd"))
    assert isinstance(optimizer, torch.optim.SGD)
    decay, rest = optimizer.param_groups
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert decay["momentum"] == rest["momentum"] == 0.9


def test_only_matrices_decay() -> None:
    model = GPT(Shape(layers=1))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    # As a rank may hold them: flat.
    shards = {name: nn.Parameter(p.detach().view(-1)) for name, p in model.named_parameters()}
    decay, rest = build_optimizer(shards, shapes, Options()).param_groups
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    matrices = {p.data_ptr() for p in model.parameters() if p.ndim == 2}
    assert {p.data_ptr() for p in decay["params"]} == matrices
    assert len(decay["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_learning_rate_rises_and_falls() -> None:
    cosine = Options(steps=100, warmup=10, lr=1.0)
    rates = [learning_rate(step, cosine) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(1, Options(steps=1, warmup=0, lr=1.0)) > 0
    constant = replace(cosine, schedule="constant")
    rates = [learning_rate(step, constant) for step in (5, 10, 11, 100)]
    assert rates == [0.5, 1.0, 1.0, 1.0]
