"""The truth about a step against values known by hand, and the kinds of tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from benchmarks.accuracy.step_truth import PART, TruthHooks, norm64
from benchmarks.accuracy.tensor_kinds import kind_of


class Tied(nn.Module):
    """Two linear layers that share a weight, and a layer that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(2, 1, bias=False)


def test_norms_of_a_step_known_by_hand() -> None:
    model = Tied()
    with torch.no_grad():
        model.first.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        model.unused.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with TruthHooks(model, optimizer) as hooks:
        model.first.weight.grad = torch.full((2, 2), 2.0)
        optimizer.step()
        optimizer.zero_grad()
    truth = hooks.last
    assert set(truth.norms["grad_norm"]) == {"first.weight", "unused.weight"}, "tied appear once"
    assert truth.norms["grad_norm"]["first.weight"] == 4.0
    assert truth.norms["update_norm"]["first.weight"] == 2.0
    assert truth.norms["weight_norm"]["first.weight"] == math.sqrt(4 + 1 + 1 + 9)
    assert math.isnan(truth.norms["grad_norm"]["unused.weight"])
    assert truth.norms["update_norm"]["unused.weight"] == 0.0
    assert truth.total_grad_norm == 4.0


def test_no_hooks_remain() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with TruthHooks(model, optimizer) as hooks:
        pass
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert hooks.last.total_grad_norm == 0.0


def test_small_squares_beside_large_ones_are_not_lost() -> None:
    """Float32 would lose them: 2**24 + 1 is 2**24 there."""
    tensor = torch.ones(PART + 3)
    tensor[0] = 2.0**13
    assert norm64(tensor) == math.sqrt(2**26 + PART + 2)


def test_bf16_differences_are_widened_before_they_are_subtracted() -> None:
    after, before = torch.tensor([1.0]).bfloat16(), torch.tensor([2.0**-9]).bfloat16()
    assert norm64(after, before) == 1 - 2.0**-9


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("transformer.wte.weight", (50257, 128), "embedding"),
        ("transformer.wpe.weight", (1024, 128), "embedding"),
        ("bert.embeddings.LayerNorm.weight", (128,), "vector"),
        (
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            (32, 4),
            "embedding",
        ),
        ("decoder.block.0.layer.0.SelfAttention.q.weight", (128, 128), "matrix"),
        ("lm_head.weight", (32000, 128), "head"),
        ("classifier.bias", (100,), "vector"),
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 512, 128), "expert"),
        ("vit.embeddings.patch_embeddings.projection.weight", (128, 3, 4, 4), "conv"),
        ("vit.embeddings.cls_token", (1, 1, 128), "vector"),
        ("vit.embeddings.position_embeddings", (1, 65, 128), "embedding"),
        ("lstm.weight_ih_l0", (512, 128), "matrix"),
        ("users.weight", (100000, 32), "embedding"),
        ("scale", (), "vector"),
    ],
)
def test_kinds(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert kind_of(name, shape) == kind
