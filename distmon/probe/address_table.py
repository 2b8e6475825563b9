"""The address table of the kernels: read on the host, refreshed by one pinned copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.address_layout import ADDRESS, ADDRESS_COLUMNS, dtype_set
from distmon.device import DeviceMark, is_accelerator
from distmon.layout import Shard
from distmon.native import NativeModule
from distmon.probe.tensor_places import ADDRESS_OF, CODE, CONTIGUOUS, What, tensor_places


class AddressTable:
    """Where every weight and gradient lies, as kernels read it.

    Nothing is copied to the device when nothing has moved since the last refresh.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        offset_rows: Sequence[torch.Tensor | None],
        native: NativeModule | None,
    ) -> None:
        """`native` reads the places faster; None reads them from Python."""
        self._places = tensor_places(shards, native)
        self._shards = shards
        self._offset_rows = list(offset_rows)
        self._offset_addresses = np.array(
            [0 if o is None else o.data_ptr() for o in offset_rows], dtype=np.int64
        )
        self._copies: dict[tuple[int, int], torch.Tensor] = {}
        self._kinds: dict[What, bytes] = {}
        self._unsure: set[What] = set()
        """What an interrupted `refresh` has left behind: found, and perhaps not uploaded."""
        self._translated: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self._numbers = np.zeros((len(shards), len(ADDRESS_COLUMNS)), dtype=np.int64)
        self.strided: dict[What, dict[int, torch.Tensor]] = {"weight": {}, "grad": {}}
        """Tensors that are not contiguous, by row, from a refresh to `release`."""
        self._has_strided: set[What] = set()
        weights = [s.weight() for s in shards]
        self.device = weights[0].device
        for shard, weight in zip(shards, weights, strict=True):
            if weight.device != self.device:
                raise ValueError(
                    f"{shard.name} is on {weight.device}, other parameters on {self.device}: "
                    "the kernels read one device"
                )
        self.dtypes = dtype_set(w.dtype for w in weights)
        """Grows when a gradient of another dtype appears; never shrinks, so little recompiles."""
        self.table = torch.zeros(self._numbers.shape, dtype=torch.int64, device=self.device)
        self._staging: list[tuple[torch.Tensor, DeviceMark]] = []

    def refresh(self, grads: bool) -> None:
        """Bring the device table up to date; only the weights when `grads` is False.

        After an error the next call writes the whole table: an address that was found and not
        uploaded would be read for ever, long after its memory was freed.
        """
        which: tuple[What, ...] = ("weight", "grad") if grads else ("weight",)
        moved = [self._update(what) for what in which]
        if any(moved):
            self._upload(self.table, self._numbers)
        self._unsure.difference_update(which)

    def without_grad(self) -> list[int]:
        """Return the rows that had no gradient to read at the last refresh."""
        found: list[int] = np.flatnonzero(self._numbers[:, ADDRESS["grad"]] == 0).tolist()
        return found

    def dense(self) -> torch.Tensor:
        """Return the table for a pass that reads memory in order, as of the last refresh.

        Order does not matter to sums, so a transposed tensor is read as it lies. Only a view with
        gaps is copied; the copies live until the next call, or `release`.
        """
        self._copies = {}
        for what, tensors in self.strided.items():
            for row, tensor in tensors.items():
                if not is_dense(tensor):
                    self._copies[row, ADDRESS[what]] = tensor.contiguous()
        if not self._copies:
            return self.table
        numbers = self._numbers.copy()
        for where, copy in self._copies.items():
            numbers[where] = copy.data_ptr()
        table = torch.empty_like(self.table)
        self._upload(table, numbers)
        return table

    def release(self) -> None:
        """Let go of tensors: a gradient that training has cleared must not stay in memory.

        Kernels that read them were launched on the stream that will use their memory next.
        """
        self.strided = {"weight": {}, "grad": {}}
        self._copies = {}

    def _update(self, what: What) -> bool:
        """Bring the numbers up to date; return False when nothing has changed."""
        unsure = what in self._unsure
        self._unsure.add(what)
        # An equal place may have other strides, so strided tensors are read every time.
        had_strided = what in self._has_strided
        if not self._places.update(what) and not had_strided and not unsure:
            return False
        if unsure:
            self._kinds.pop(what, None)
        places, first = self._places.places[what], ADDRESS[what]
        self._numbers[:, first] = places[:, ADDRESS_OF]
        kinds = places[:, CODE:].tobytes()
        if kinds == self._kinds.get(what) and not had_strided:
            return True
        self._kinds[what] = kinds
        codes = np.maximum(places[:, CODE], 0)
        self._numbers[:, first + 1] = codes
        self._numbers[:, first + 2] = self._offset_addresses
        self.dtypes |= int(np.bitwise_or.reduce(1 << codes[places[:, CODE] >= 0], initial=0))
        self.strided[what] = {
            row: self._tensor(what, row)
            for row in np.flatnonzero(places[:, CONTIGUOUS] == 0).tolist()
        }
        (self._has_strided.add if self.strided[what] else self._has_strided.discard)(what)
        for row, tensor in self.strided[what].items():
            self._numbers[row, first + 2] = self._strided_offsets(row, tensor)
        return True

    def _tensor(self, what: What, row: int) -> torch.Tensor:
        shard = self._shards[row]
        tensor = shard.weight() if what == "weight" else shard.grad()
        assert tensor is not None
        return tensor

    def _strided_offsets(self, row: int, tensor: torch.Tensor) -> int:
        """Return the address of the row's offsets in the tensor's memory order; made once each."""
        offsets = self._offset_rows[row]
        if offsets is None:
            return 0
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if reach >= 2**31 and offsets.dtype == torch.int32:
            raise ValueError("a strided view reaches beyond 2**31 elements of its storage")
        key = (row, tensor.stride())
        if key not in self._translated:
            self._translated[key] = in_memory_order(offsets, tensor).to(offsets.dtype)
        return self._translated[key].data_ptr()

    def _upload(self, out: torch.Tensor, numbers: NDArray[np.int64]) -> None:
        source = torch.from_numpy(numbers)
        if not is_accelerator(self.device):
            out.copy_(source)
            return
        # A pinned buffer may be written again only after its copy ran; instead of waiting for it
        # another one is taken.
        free = next((i for i, (_, copied) in enumerate(self._staging) if copied.done()), None)
        if free is None:
            buffer = torch.empty_like(source, pin_memory=True)
        else:
            buffer, _ = self._staging.pop(free)
        buffer.copy_(source)
        out.copy_(buffer, non_blocking=True)
        self._staging.append((buffer, DeviceMark(self.device)))


def in_memory_order(offsets: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return where the elements at flat `offsets` of a strided tensor lie, int64."""
    places = torch.unravel_index(offsets.long(), tensor.shape)
    memory = torch.zeros_like(offsets, dtype=torch.int64)
    for place, stride in zip(places, tensor.stride(), strict=True):
        memory += place * stride
    return memory


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one piece of memory, in whatever order."""
    expected = 1
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in dims:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
