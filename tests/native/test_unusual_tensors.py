"""Tensors that cannot be read by address are left to Python, and nothing ends the process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from csrc_triton.row_layout import GROUPS, MAX_COLUMNS, SUM_COLUMNS
from distmon.collect.gradient_gain.backward_norms import BackwardNorms
from distmon.collect.gradient_gain.block_table import COLUMNS, Blocks
from distmon.layout.plain import plain_shard
from distmon.native import WHOLE_WEIGHT, NativeModule
from distmon.probe.tensor_places import PlacesByNative, PlacesByPython

CPU = torch.device("cpu")


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(18), 0.1, 0, torch.qint8)


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(18)


def _freed() -> torch.Tensor:
    tensor = torch.ones(18)
    tensor.untyped_storage().resize_(0)
    return tensor


def _freed_under_a_view() -> torch.Tensor:
    tensor = torch.ones(30)[12:]
    tensor.untyped_storage().resize_(0)
    return tensor


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "nested, strided": lambda: _nested(torch.strided),
    "nested, jagged": lambda: _nested(torch.jagged),
    "sparse": lambda: torch.ones(3, 6).to_sparse(),
    "sparse rows": lambda: torch.ones(3, 6).to_sparse_csr(),
    "meta": lambda: torch.ones(18, device="meta"),
    "quantized": _quantized,
    "fake": _fake,
    "dispatches in Python": lambda: TwoTensor(torch.ones(18), torch.ones(18)),
    "mkldnn": lambda: torch.ones(18).to_mkldnn(),
    "zero without memory": lambda: torch._efficientzerotensor(18),
    "complex": lambda: torch.ones(18, dtype=torch.complex64),
    "bool": lambda: torch.ones(18, dtype=torch.bool),
    "freed": _freed,
    "freed under a view": _freed_under_a_view,
}


@pytest.fixture(params=UNUSUAL)
def unusual(request: pytest.FixtureRequest) -> torch.Tensor:
    """A tensor of 18 elements that kernels cannot read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested and csr tensors are prototypes
        return UNUSUAL[request.param]()


def test_its_norm_is_left_to_python(unusual: torch.Tensor, native: NativeModule) -> None:
    cell = np.zeros(2)
    assert native.add_norm(unusual, [cell]) is False
    assert not cell.any()


def test_its_place_is_left_to_python(unusual: torch.Tensor, native: NativeModule) -> None:
    """As a weight, as a gradient, and in the slot of another tensor."""
    plain, out = torch.ones(18), np.full((3, 3), 7)
    holder = torch.ones(18).as_subclass(_Holder)
    holder.held = unusual
    attributes, numels = [None, "held", None], np.full(3, 18)
    reader = native.place_reader([unusual, holder, plain], attributes, CPU, numels, out)
    assert reader.read_weights() == [0, 1]
    assert (out[:2] == 7).all()
    assert tuple(out[2]) == (plain.data_ptr(), 0, 1)


class _Holder(torch.Tensor):
    __slots__ = ("held",)
    held: torch.Tensor


@pytest.mark.parametrize("kind", [kind for kind in UNUSUAL if not kind.startswith("nested")])
def test_both_readers_say_the_same_about_it(kind: str, native: NativeModule) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight = UNUSUAL[kind]()
    parameter = torch.nn.Parameter(torch.ones(18), requires_grad=False)
    shards = [plain_shard("w", parameter), plain_shard("v", torch.nn.Parameter(torch.ones(2)))]
    readers = [PlacesByPython(shards), PlacesByNative(shards, native)]
    torch.utils.swap_tensors(parameter, weight)
    said = []
    for reader in readers:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
            reader.update("weight")
        said.append((type(raised.value), str(raised.value).splitlines()[0]))
    assert said[0] == said[1]


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_weight_that_became_nested_is_named(layout: torch.layout, native: NativeModule) -> None:
    parameter = torch.nn.Parameter(torch.ones(18), requires_grad=False)
    places = PlacesByNative([plain_shard("w", parameter)], native)
    torch.utils.swap_tensors(parameter, _nested(layout))
    with pytest.raises(ValueError, match="the weight of w is a nested tensor"):
        places.update("weight")


def test_a_subclass_with_memory_of_its_own_is_read(native: NativeModule) -> None:
    cell, out = np.zeros(2), np.zeros((1, 3), np.int64)
    tensor = torch.full((9,), 2.0).as_subclass(_Holder)
    assert native.add_norm(tensor, [cell])
    assert cell.tolist() == [6.0, 1.0]
    assert native.place_reader([tensor], [None], CPU, np.array([9]), out).read_weights() == []
    assert out[0, 0] == tensor.data_ptr()


def test_tensors_inside_a_transform_are_left_to_python(native: NativeModule) -> None:
    inside: list[bool] = []

    def norm(x: torch.Tensor) -> torch.Tensor:
        inside.append(native.add_norm(x, [np.zeros(2)]))
        return x.sum()

    torch.func.vmap(norm)(torch.ones(3, 4))
    torch.func.grad(norm)(torch.ones(4))
    torch.func.functionalize(norm)(torch.ones(4))
    assert inside == [False] * 3


def test_what_is_no_tensor_has_no_norm(native: NativeModule) -> None:
    for wrong in (None, 3.0, [torch.ones(3)], torch.Tensor):
        assert native.add_norm(wrong, [np.zeros(2)]) is False  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have 2 items of 8 bytes"):
        native.add_norm(torch.ones(3), [np.zeros(3)])
    with pytest.raises(TypeError):
        native.add_norm(torch.ones(3), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("numel", "error"), [(2**60, MemoryError), (2**63 - 1, RuntimeError)])
def test_what_cplusplus_throws_is_a_python_exception(
    numel: int, error: type[Exception], native: NativeModule
) -> None:
    parameter = torch.zeros(3)
    places = native.place_reader(
        [parameter], [None], CPU, np.array([3]), np.zeros((1, 3), np.int64)
    )
    none, empty = np.zeros(1, np.int64), np.zeros(0, np.int64)
    reader = native.row_reader(
        places,
        *(0, 8, none, np.zeros(1, np.int32), np.zeros((1, GROUPS), np.int32), empty),
        *(4, np.zeros(0, np.float32), np.zeros(1)),
        *(0, 8, np.zeros(2, np.int64), empty, np.zeros(0, np.uint8)),
        np.array([numel]),
        np.array([WHOLE_WEIGHT], np.uint8),
    )
    rows = (np.zeros((1, len(SUM_COLUMNS))), np.zeros((1, len(MAX_COLUMNS)), np.float32))
    with pytest.raises(error):
        reader.measure(False, 1, False, 0, 0, np.ones(1), *rows, None, none)


class _Nesting(torch.nn.Module):
    """Hands a nested tensor from one block to the next, as attention over ragged batches does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows))


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    batch = torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), 2.0)])
    model(batch).to_padded_tensor(0.0).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
def test_backward_through_nested_tensors_is_not_disturbed(native: NativeModule) -> None:
    model = _Nesting()
    expected = _gradients(copy.deepcopy(model))
    modules: dict[str, Any] = dict(model.named_children())
    norms = BackwardNorms(Blocks(tuple(modules), ()), modules, CPU, native=native)
    norms.install()
    norms.arm(wanted=True, first=False)
    for mine, plain in zip(_gradients(model), expected, strict=True):
        assert torch.equal(mine, plain)
    sent = torch.zeros(norms.size, dtype=torch.float64)
    norms.send(sent)
    table = sent.view(-1, len(COLUMNS))
    fault = norms.take_fault()
    assert fault is not None or table[:, -1].eq(1).all()
