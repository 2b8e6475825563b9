"""Where every weight and gradient lies: the only work per parameter on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.address_layout import dtype_code
from distmon.layout import Shard
from distmon.native import NativeModule, PlaceReader

What = Literal["weight", "grad"]
Places = NDArray[np.int64]
"""[rows, 3]: address, dtype code, and 1 where the tensor is contiguous."""

ADDRESS_OF: Final = 0
CODE: Final = 1
CONTIGUOUS: Final = 2
NOTHING: Final = (0, -1, 1)
"""The place of a gradient that is not there."""
_dtype = attrgetter("dtype")
_device = attrgetter("device")
_Lists = tuple[list[int], list[torch.dtype | None], list[bool]]


class TensorPlaces(Protocol):
    """The places of all weights and all gradients of some shards."""

    places: dict[What, Places]
    """As of the last update."""

    def update(self, what: What) -> bool:
        """Bring `places` up to date; return False when nothing has moved.

        Each call raises TypeError for a dtype that kernels cannot read, and ValueError for a tensor
        that does not have the elements that it had at first.
        """
        ...


def tensor_places(shards: Sequence[Shard], native: NativeModule | None) -> TensorPlaces:
    """Return the compiled reader where the native module is built, or the one in Python."""
    if native is None:
        return PlacesByPython(shards)
    return PlacesByNative(shards, native)


class _Reader:
    """Reads one row through its shard, and names what is wrong with it."""

    def __init__(self, what: What, shard: Shard) -> None:
        self._what, self._name = what, shard.name
        self._read: Callable[[], torch.Tensor | None] = (
            shard.weight if what == "weight" else shard.grad
        )
        weight = shard.weight()
        self._numel, self._device = weight.numel(), weight.device

    def __call__(self) -> torch.Tensor | None:
        """Return the tensor; ValueError when it does not have the elements that are sampled.

        Reading them by address would end the process.
        """
        tensor = self._read()
        if tensor is None:
            return None
        about = f"the {self._what} of {self._name}"
        if tensor.is_nested:
            raise ValueError(f"{about} is a nested tensor, which has no single shape to sample")
        if tensor.numel() != self._numel:
            raise ValueError(
                f"{about} has {tensor.numel()} elements here, and the parameter had "
                f"{self._numel} when the monitor was attached"
            )
        if self._numel and tensor.device != self._device:
            raise ValueError(
                f"{about} is on {tensor.device}, and the parameter was on {self._device} when the "
                "monitor was attached"
            )
        if self._numel and not _has_elements(tensor):
            raise ValueError(f"the memory of {about} was freed")
        return tensor


def row_readers(shards: Sequence[Shard]) -> dict[What, list[_Reader]]:
    """Return a reader of every weight and gradient through its shard; see `_Reader`."""
    return {
        "weight": [_Reader("weight", s) for s in shards],
        "grad": [_Reader("grad", s) for s in shards],
    }


def _has_elements(tensor: torch.Tensor) -> bool:
    """Return whether all lie within its storage, which may have been freed under a view."""
    last = tensor.storage_offset()
    last += sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    storage = tensor.untyped_storage()
    return bool(storage.data_ptr()) and last < storage.nbytes() // tensor.element_size()


def place_of(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    """Return one row."""
    if tensor is None:
        return NOTHING
    return tensor.data_ptr(), dtype_code(tensor.dtype), int(tensor.is_contiguous())


class PlacesByNative:
    """Follows `Shard.paths` in C++, and asks the shard for what cannot be read that way."""

    def __init__(self, shards: Sequence[Shard], native: NativeModule) -> None:
        self._readers = row_readers(shards)
        self._now = np.zeros((len(shards), 3), dtype=np.int64)
        reader = _place_reader(shards, native, self._now)
        self._read: dict[What, Callable[[], list[int]]] = {
            "weight": reader.read_weights,
            "grad": reader.read_grads,
        }
        self._content: dict[What, bytes] = {}
        self.places: dict[What, Places] = {
            "weight": np.zeros_like(self._now),
            "grad": np.zeros_like(self._now),
        }

    def update(self, what: What) -> bool:
        now = self._now
        for row in self._read[what]():
            now[row] = place_of(self._readers[what][row]())
        # As bytes: after a step of training the code of numpy's comparison is cold, and costs more
        # than the comparison.
        content = now.tobytes()
        if content == self._content.get(what):
            return False
        self.places[what][:] = now
        self._content[what] = content
        return True


def tensors_to_follow(shards: Sequence[Shard], native: NativeModule) -> PlaceReader:
    """Return the compiled reader that follows `Shard.paths`; its places are for itself."""
    return _place_reader(shards, native, np.zeros((len(shards), 3), dtype=np.int64))


def _place_reader(shards: Sequence[Shard], native: NativeModule, out: Places) -> PlaceReader:
    followed = [_followed(shard) for shard in shards]
    return native.place_reader(
        [parameter for parameter, _ in followed],
        [attribute for _, attribute in followed],
        shards[0].weight().device,
        np.array([s.weight().numel() for s in shards], dtype=np.int64),
        out,
    )


def _followed(shard: Shard) -> tuple[torch.Tensor | None, str | None]:
    """Return the parameter that leads to weight and gradient, and its attribute that does."""
    name = shard.paths[0] if shard.paths else ""
    if shard.paths != (name, f"grad.{name}" if name else "grad"):
        return None, None
    return shard.parameter, name or None


class PlacesByPython:
    """Reads the same from Python: lists, of which only changed columns become numbers."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._readers = row_readers(shards)
        paths = {s.paths for s in shards}
        path = paths.pop() if len(paths) == 1 else None
        self._parameters = [s.parameter for s in shards if s.parameter is not None] if path else []
        self._follow: dict[What, Callable[[torch.Tensor], torch.Tensor]] = {}
        if path:
            self._follow = {
                "weight": attrgetter(path[0]) if path[0] else _itself,
                "grad": attrgetter(path[1]),
            }
        weights = [s.weight() for s in shards]
        self._numels, self._devices = [w.numel() for w in weights], [w.device for w in weights]
        self._lists: dict[What, _Lists] = {}
        self.places: dict[What, Places] = {
            "weight": np.zeros((len(shards), 3), dtype=np.int64),
            "grad": np.zeros((len(shards), 3), dtype=np.int64),
        }

    def update(self, what: What) -> bool:
        now, before = self._read(what), self._lists.get(what)
        if now == before:
            return False
        pointers, dtypes, contiguous = now
        places = self.places[what]
        if before is None or dtypes != before[1]:
            places[:, CODE] = [NOTHING[CODE] if d is None else dtype_code(d) for d in dtypes]
        places[:, ADDRESS_OF] = pointers
        if before is None or contiguous != before[2]:
            places[:, CONTIGUOUS] = contiguous
        self._lists[what] = now
        return True

    def _read(self, what: What) -> _Lists:
        """Without a Python call per parameter where shards allow it: a quarter less host time."""
        readers = self._readers[what]
        if not self._follow:
            return _lists([read() for read in readers])
        try:
            found = list(map(self._follow[what], self._parameters))
            pointers, dtypes, contiguous = lists = (
                list(map(torch.Tensor.data_ptr, found)),
                list(map(_dtype, found)),
                list(map(torch.Tensor.is_contiguous, found)),
            )
            whole = (
                list(map(torch.Tensor.numel, found)) == self._numels
                and list(map(_device, found)) == self._devices
            )
            begins = list(map(torch.Tensor.storage_offset, found))
        except (TypeError, AttributeError, RuntimeError):
            whole = False  # one is None or sparse
        if not whole:
            return _lists([read() for read in readers])
        if 0 in pointers or any(begins):
            # Empty, freed, a wrapper that has no memory of its own, or a view of what may be freed.
            for row in [i for i, pointer in enumerate(pointers) if not pointer or begins[i]]:
                (pointers[row],), (dtypes[row],), (contiguous[row],) = _lists([readers[row]()])
        return lists


def _lists(tensors: Sequence[torch.Tensor | None]) -> _Lists:
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    dtypes = [None if t is None else t.dtype for t in tensors]
    return pointers, dtypes, [t is None or t.is_contiguous() for t in tensors]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
