"""The compiled reader finds what Python finds, whatever becomes of the tensors."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as OneDimension
from torch.testing._internal.distributed.fake_pg import FakeStore

from csrc_triton.address_layout import ADDRESS
from distmon.layout.dtensor import dtensor_shard
from distmon.layout.plain import plain_shard
from distmon.layout.shard import Shard, absent_shard
from distmon.native import NativeModule
from distmon.probe.address_table import AddressTable
from distmon.probe.tensor_places import NOTHING, PlacesByNative, PlacesByPython, place_of
from distmon.sampling.plan import build_plan
from distmon.sampling.reading import Reading

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[None]:
    """Rank 0 of two, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def _parameters() -> list[torch.nn.Parameter]:
    """All dtypes, and one that is empty."""
    made = [torch.nn.Parameter(torch.randn(12, 10).to(dtype)) for dtype in DTYPES]
    return [*made, torch.nn.Parameter(torch.randn(0, 10))]


def _sharded(rows: int) -> torch.nn.Parameter:
    mesh = init_device_mesh("cpu", (2,))
    return torch.nn.Parameter(
        DTensor.from_local(torch.randn(rows, 10), mesh, [OneDimension(0)], run_check=False)
    )


def _sharded_grad(parameter: torch.nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    spec = parameter._spec  # type: ignore[attr-defined]
    return DTensor(local, spec, requires_grad=False)  # type: ignore[abstract]


class Pair:
    """Both readers of the same shards, compared at every update with each other and the shards."""

    def __init__(self, shards: list[Shard], native: NativeModule) -> None:
        self.shards = shards
        offsets: list[torch.Tensor | None] = [None] * len(shards)
        for chunk in build_plan(shards, Reading(64), 0, CPU).chunks:
            for k, row in enumerate(chunk.rows):
                offsets[row] = chunk.offsets[k]
        self.by_python, self.by_native = PlacesByPython(shards), PlacesByNative(shards, native)
        self.tables = [AddressTable(shards, offsets, module) for module in (None, native)]

    @torch.no_grad()  # as in a probe
    def update(self) -> dict[str, bool]:
        """What moved."""
        moved = {}
        for what in ("weight", "grad"):
            moved[what] = self.by_python.update(what)
            assert self.by_native.update(what) == moved[what]
            found = self.by_native.places[what]
            assert np.array_equal(found, self.by_python.places[what])
            for row, shard in enumerate(self.shards):
                tensor = shard.weight() if what == "weight" else shard.grad()
                assert tuple(found[row]) == place_of(tensor)
        for table in self.tables:
            table.refresh(grads=True)
        python, native = self.tables
        # Rows that are not contiguous have offsets of their own in each table.
        skipped = {
            (row, ADDRESS[f"{what}_offsets"])
            for what in native.strided
            for row in native.strided[what]
        }
        for row, column in np.ndindex(*native.table.shape):
            if (row, column) not in skipped:
                assert native.table[row, column] == python.table[row, column]
        assert native.dtypes == python.dtypes
        for what in native.strided:
            assert native.strided[what].keys() == python.strided[what].keys()
        return moved


def _set_grads(
    parameters: list[torch.nn.Parameter], make: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor | None]:
    old = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = make(parameter.detach())
    return old  # kept alive, so that new ones lie elsewhere


def test_plain_parameters_while_everything_happens_to_them(native: NativeModule) -> None:
    parameters = _parameters()
    pair = Pair([plain_shard(f"p{i}", p) for i, p in enumerate(parameters)], native)
    assert pair.update() == {"weight": True, "grad": True}
    assert (pair.by_native.places["grad"] == NOTHING).all()
    assert pair.update() == {"weight": False, "grad": False}

    kept = [_set_grads(parameters, torch.zeros_like)]
    assert pair.update() == {"weight": False, "grad": True}
    assert pair.update() == {"weight": False, "grad": False}
    kept.append(_set_grads(parameters, torch.zeros_like))
    assert pair.update() == {"weight": False, "grad": True}
    parameters[1].grad = None
    assert pair.update() == {"weight": False, "grad": True}
    kept.append(_set_grads(parameters, lambda p: torch.zeros(p.shape[::-1], dtype=p.dtype).t()))
    assert pair.update()["grad"]
    assert (pair.by_native.places["grad"][:5, 2] == 0).all()
    parameters[0].grad = torch.ones(12, 10).to_sparse()
    assert pair.update()["grad"]
    assert tuple(pair.by_native.places["grad"][0]) == NOTHING

    parameters[2].data = torch.randn(12, 10).half()
    assert pair.update()["weight"]
    parameters[3].data = parameters[3].data.view(10, 12).t()  # the same address, other strides
    assert pair.update()["weight"]
    parameters[4].grad = None
    parameters[4].data = torch.randn(12, 10)  # another dtype
    assert pair.update()["weight"]
    other = torch.nn.Parameter(torch.randn(12, 10))
    parameters[0].grad = None
    torch.utils.swap_tensors(parameters[0], other)
    assert pair.update()["weight"]
    assert not pair.update()["weight"]


def test_gradients_that_backward_made(native: NativeModule) -> None:
    """Of those no Python object exists."""
    model = torch.nn.Linear(40, 30)
    pair = Pair([plain_shard(n, p) for n, p in model.named_parameters()], native)
    model(torch.randn(3, 40)).sum().backward()
    assert pair.update()["grad"]
    assert (pair.by_native.places["grad"][:, 0] != 0).all()


@pytest.mark.usefixtures("two_ranks")
def test_sharded_parameters(native: NativeModule) -> None:
    parameters = [_sharded(rows) for rows in (4, 1, 0, 70)]
    shards = [dtensor_shard(f"p{i}", p, True) for i, p in enumerate(parameters)]  # type: ignore[arg-type]
    pair = Pair(shards, native)
    assert pair.update() == {"weight": True, "grad": True}
    assert pair.by_native.places["weight"][2, 0] == 0
    for _ in range(2):
        kept = [p.grad for p in parameters]
        for p in parameters:
            p.grad = _sharded_grad(p, torch.zeros_like(p._local_tensor))  # type: ignore[attr-defined]
        assert pair.update() == {"weight": False, "grad": True}
        assert pair.update() == {"weight": False, "grad": False}
        assert len(kept) == 4
    parameters[0].grad = None
    parameters[1].grad = _sharded_grad(parameters[1], torch.zeros(10, 2).t()[:1])
    assert pair.update()["grad"]
    # One that a collective still works on has no memory of its own; its shard waits for it.
    inside = torch.zeros(70, 10)
    parameters[3].grad = _sharded_grad(parameters[3], AsyncCollectiveTensor(inside))
    assert pair.update()["grad"]
    assert pair.by_native.places["grad"][3, 0] == inside.data_ptr()
    parameters[3]._local_tensor = torch.randn(70, 10)  # type: ignore[attr-defined]
    assert pair.update()["weight"]


@pytest.mark.usefixtures("two_ranks")
def test_shards_of_every_kind_at_once(native: NativeModule) -> None:
    """More than one block of rows, some of which only their shard can read."""
    shards = [absent_shard("gone", (5, 5), torch.float32, CPU, requires_grad=True)]
    parameters = []
    for i in range(35):
        plain, sharded = torch.nn.Parameter(torch.randn(6, 10)), _sharded(3)
        plain.grad = torch.zeros(6, 10) if i % 3 else None
        sharded.grad = _sharded_grad(sharded, torch.zeros(3, 10))
        parameters += [plain, sharded]
        shards.append(plain_shard(f"plain{i}", plain))
        shards.append(dtensor_shard(f"sharded{i}", sharded, bool(i % 2)))  # type: ignore[arg-type]
    shards[7] = replace(shards[7], paths=None)
    pair = Pair(shards, native)
    assert pair.update() == {"weight": True, "grad": True}
    parameters[68].grad = torch.zeros(6, 10)
    assert pair.update() == {"weight": False, "grad": True}


def test_a_dtype_that_kernels_cannot_read_is_named_at_every_update(native: NativeModule) -> None:
    strange = torch.nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fnuz), requires_grad=False)
    shards = [plain_shard("plain", torch.nn.Parameter(torch.ones(4))), plain_shard("w", strange)]
    for places in (PlacesByPython(shards), PlacesByNative(shards, native)):
        for _ in range(2):
            with pytest.raises(TypeError, match="not float8_e4m3fnuz"):
                places.update("weight")


def _another_size(tensor: torch.Tensor) -> None:
    tensor.data = torch.empty(0)


def _freed(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _freed_under_a_view(tensor: torch.Tensor) -> None:
    """Its address is now a small number, not null."""
    tensor.data = torch.ones(60)[50:56]
    tensor.untyped_storage().resize_(0)


def _cut_short(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones(13)[1::2]
    tensor.untyped_storage().resize_(4 * 11)


def _elsewhere(tensor: torch.Tensor) -> None:
    """A gradient is always where its weight is."""
    tensor.grad = None
    torch.utils.swap_tensors(tensor, torch.nn.Parameter(torch.empty(6, device="meta")))


_TROUBLES = [_another_size, _freed, _freed_under_a_view, _cut_short]


@pytest.mark.parametrize(
    ("what", "trouble"), [*product(["weight", "grad"], _TROUBLES), ("weight", _elsewhere)]
)
def test_a_tensor_that_lost_its_elements_is_named_at_every_update(
    what: Literal["weight", "grad"], trouble: Callable[[torch.Tensor], None], native: NativeModule
) -> None:
    """Whoever reads by address would read what is not there."""
    parameters = [torch.nn.Parameter(torch.randn(6)) for _ in range(3)]
    shards = [plain_shard(f"p{i}", p) for i, p in enumerate(parameters)]
    for parameter in parameters:
        parameter.grad = torch.ones(6)
    by_python, by_native = PlacesByPython(shards), PlacesByNative(shards, native)
    for places in (by_python, by_native):
        assert places.update(what)
    broken = parameters[1] if what == "weight" else parameters[1].grad
    assert broken is not None
    trouble(broken)
    for places in (by_python, by_native):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"the {what} of p1"):
                places.update(what)


def test_what_is_no_tensor_is_left_to_python(native: NativeModule) -> None:
    out = np.full((3, 3), 7, dtype=np.int64)
    tensor = torch.ones(3)
    given = [tensor, "no tensor", tensor]
    sizes = np.array([3, 3, 3])
    reader = native.place_reader(given, [None, None, "no_such_slot"], CPU, sizes, out)
    assert reader.read_weights() == [1, 2]
    assert tuple(out[0]) == (tensor.data_ptr(), 0, 1)
    assert (out[1:] == 7).all()
    assert reader.read_grads() == [1]
    assert [tuple(row) for row in out[::2]] == [NOTHING] * 2


def test_arrays_that_do_not_fit_are_refused(native: NativeModule) -> None:
    tensors, names, sizes, out = [torch.ones(3)], [None], np.array([3]), np.zeros((1, 3), np.int64)
    for wrong in (
        (tensors, [], CPU, sizes, out),
        (tensors, names, CPU, np.array([3, 3]), out),
        (tensors, names, CPU, sizes.astype(np.int32), out),
        (tensors, names, CPU, sizes, np.zeros((3, 3), np.int64)),
        (tensors, names, CPU, sizes, out.astype(np.float32)),
    ):
        with pytest.raises(ValueError, match="must"):
            native.place_reader(*wrong)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        native.place_reader(tensors, names, CPU, sizes, out)
    with pytest.raises(TypeError, match=r"torch\.device"):
        native.place_reader(tensors, names, "cpu", sizes, out)


def test_a_reader_goes_with_the_parameter_that_holds_it(native: NativeModule) -> None:
    """As a hook that leads to a monitor does."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.reader = native.place_reader(  # type: ignore[attr-defined]
        [parameter], [None], CPU, np.array([3]), np.zeros((1, 3), np.int64)
    )
    gone = weakref.ref(parameter)
    del parameter
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("two_ranks")
def test_reading_keeps_no_references(native: NativeModule) -> None:
    parameter = _sharded(4)
    parameter.grad = _sharded_grad(parameter, torch.zeros(4, 10))
    held: list[Any] = [parameter, parameter._local_tensor, parameter.grad]  # type: ignore[attr-defined]
    held += [parameter.grad._local_tensor]
    before = [sys.getrefcount(each) for each in held]
    out = np.zeros((2, 3), np.int64)
    names = ["_local_tensor", None]
    reader = native.place_reader([parameter, parameter], names, CPU, np.array([40, 40]), out)
    for _ in range(10):
        assert reader.read_weights() == [1]  # the wrapper itself has no memory
        assert reader.read_grads() == [1]
    del reader, names
    assert [sys.getrefcount(each) for each in held] == before


def test_a_property_is_left_to_python(native: NativeModule) -> None:
    """It could do anything, while pointers to other tensors are held."""
    tensor = torch.ones(3).as_subclass(_WithProperty)
    out = np.zeros((2, 3), np.int64)
    reader = native.place_reader([tensor, tensor], ["inner"] * 2, CPU, np.array([3, 3]), out)
    assert reader.read_weights() == [0, 1]


class _WithProperty(torch.Tensor):
    @property
    def inner(self) -> torch.Tensor:
        raise AssertionError("Python code ran")
