"""`capture`: which shards it finds in a model, and their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distmon
from distmon.errors import LayoutError
from distmon.layout import capture
from distmon.layout.names import clean_name


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.module = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.table = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)


def test_tied_weights_count_once_and_integers_not_at_all() -> None:
    names = [shard.name for shard in capture(Tied())]
    assert names == ["embed.weight", "module.weight", "module.bias"]


def test_names_do_not_depend_on_wrappers() -> None:
    plain = [shard.name for shard in capture(Tied())]
    assert [shard.name for shard in capture(nn.DataParallel(Tied()))] == plain
    assert [shard.name for shard in capture(torch.compile(Tied()))] == plain
    assert [shard.name for shard in capture(torch.compile(nn.DataParallel(Tied())))] == plain
    assert clean_name("a._orig_mod.b._fsdp_wrapped_module._checkpoint_wrapped_module.w") == "a.b.w"


def test_weight_and_gradient_are_the_current_tensors() -> None:
    model = nn.Linear(3, 3, bias=False)
    (shard,) = capture(model)
    assert shard.grad() is None
    model(torch.ones(1, 3)).sum().backward()
    assert shard.grad() is model.weight.grad
    model.weight.data = torch.full((3, 3), 7.0)
    assert shard.weight().data_ptr() == model.weight.data_ptr()
    assert shard.numel == 9


def test_include_and_exclude() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert [s.name for s in capture(model, ["*.weight"])] == ["0.weight", "1.weight"]
    assert [s.name for s in capture(model, exclude=["0.*"])] == ["1.weight", "1.bias"]
    with pytest.raises(LayoutError, match=r"nothing\*.* none of the model's 4 parameters"):
        capture(model, ["nothing*"])


def test_errors_for_models_that_cannot_be_observed() -> None:
    with pytest.raises(LayoutError, match="ReLU has no parameters"):
        capture(nn.ReLU())
    with pytest.raises(LayoutError, match=r"torch\.nn\.Module, not a dict"):
        capture({})  # type: ignore[arg-type]
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(LayoutError, match=r"weight is on the meta device"):
        distmon.attach(model, None, sinks=[])
    with pytest.raises(LayoutError, match=r"two parameters of this rank have the name weight"):
        capture([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_pipeline_stages_get_the_names_of_the_whole_model() -> None:
    stages = [nn.ModuleDict({"1": nn.Linear(2, 2)}), nn.ModuleDict({"3": nn.Linear(2, 2)})]
    names = [shard.name for shard in capture(stages, rename=lambda name: f"blocks.{name}")]
    assert names == ["blocks.1.weight", "blocks.1.bias", "blocks.3.weight", "blocks.3.bias"]


def test_sparse_gradients_are_read_through_their_values() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    (shard,) = capture(model)
    assert shard.sparse_grad() is None
    model(torch.tensor([1])).sum().backward()
    assert shard.grad() is None
    assert shard.sparse_grad() is model.weight.grad
    assert not shard.grad_is_unreadable()


def test_complex_parameters_are_read_as_real_and_imaginary_parts() -> None:
    parameter = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
    (shard,) = capture(nn.ParameterDict({"w": parameter}))
    assert (shard.global_shape, shard.dtype) == ((3, 5, 2), torch.float32)
    assert shard.weight()[1, 2].tolist() == [parameter[1, 2].real, parameter[1, 2].imag]
    assert shard.grad() is None
    (parameter.abs() ** 2).sum().backward()
    grad = shard.grad()
    assert grad is not None
    assert torch.equal(torch.view_as_complex(grad), parameter.grad)


def test_parameters_of_integers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    model.levels = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    assert [shard.name for shard in capture(model)] == ["weight", "bias"]
    assert "not monitored: levels (int32)" in caplog.text


def test_a_lazy_module_is_one_sentence() -> None:
    with pytest.raises(LayoutError, match=r"0\.weight has no shape yet.*call the model once"):
        capture(nn.Sequential(nn.LazyLinear(4)))
