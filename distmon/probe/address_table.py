"""The address table of the Triton kernels: found on the host, refreshed by one pinned copy."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import numpy as np
import torch

from csrc_triton.dtypes import dtype_code, dtype_set
from csrc_triton.tables import ADDRESS, ADDRESS_COLUMNS
from distmon.layout import Shard

Seen = tuple[list[int], list[torch.dtype | None], list[bool]]
"""Address, dtype and contiguity by row."""
_dtype = attrgetter("dtype")


class AddressTable:
    """Where every weight and gradient lies now.

    What moved is found by comparing pointers, dtypes and contiguity with the last ones; nothing is
    copied when nothing moved. This is the only work per parameter on the host.
    """

    def __init__(self, shards: Sequence[Shard], offset_rows: Sequence[torch.Tensor | None]) -> None:
        self._weights = [s.weight for s in shards]
        self._grads = [s.grad for s in shards]
        paths = {s.paths for s in shards}
        self._paths = paths.pop() if len(paths) == 1 else None
        self._parameters = [s.parameters[0] for s in shards] if self._paths else []
        self._offset_rows = list(offset_rows)
        self._translated: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self._known_weights: list[torch.Tensor] = []
        self._numbers = np.zeros((len(shards), len(ADDRESS_COLUMNS)), dtype=np.int64)
        self._seen: dict[str, Seen] = {}
        self.strided: dict[str, dict[int, torch.Tensor]] = {"weight": {}, "grad": {}}
        """Tensors that are not contiguous, by row, as of the last refresh."""
        weights = [w() for w in self._weights]
        self.device = weights[0].device
        for shard, weight in zip(shards, weights, strict=True):
            if weight.device != self.device:
                raise ValueError(
                    f"{shard.name} is on {weight.device}, other parameters on {self.device}: "
                    "the Triton kernels read one device"
                )
        self.dtypes = dtype_set(w.dtype for w in weights)
        """Grows when a gradient of another dtype appears; never shrinks, so little recompiles."""
        self.table = torch.zeros(self._numbers.shape, dtype=torch.int64, device=self.device)
        self._staging: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def refresh(self, grads: bool) -> None:
        """Bring the device table up to date; only the weights when `grads` is False."""
        moved = self._look_at_weights()
        if grads:
            moved |= self._look_at_grads()
        if moved:
            self._upload(self.table, self._numbers)

    def _look_at_weights(self) -> bool:
        """The same tensor objects at the same addresses have not changed dtype or strides."""
        if self._paths is None:
            weights = [w() for w in self._weights]
        elif self._paths[0]:
            weights = list(map(attrgetter(self._paths[0]), self._parameters))
        else:
            weights = self._parameters
        known = self._known_weights
        same = weights is known or (len(known) == len(weights) and all(map(is_, weights, known)))
        if same and not self.strided["weight"]:
            pointers = list(map(torch.Tensor.data_ptr, weights))
            if pointers == self._seen["weight"][0]:
                return False
        self._known_weights = weights
        return self._look("weight", weights)

    def _look_at_grads(self) -> bool:
        """Without a Python call per parameter where shards allow it: a quarter less host time."""
        if self._paths is not None:
            try:
                grads = list(map(attrgetter(self._paths[1]), self._parameters))
                found = (
                    list(map(torch.Tensor.data_ptr, grads)),
                    list(map(_dtype, grads)),
                    list(map(torch.Tensor.is_contiguous, grads)),
                )
            except (TypeError, AttributeError, RuntimeError):
                pass  # one is None or sparse; the look at each raises what is really wrong
            else:
                return self._update("grad", grads, found)
        return self._look("grad", [g() for g in self._grads])

    def with_addresses(self, out: torch.Tensor, changed: dict[str, dict[int, int]]) -> None:
        """Fill `out` with the table in which some addresses are replaced."""
        numbers = self._numbers.copy()
        for what, addresses in changed.items():
            for row, address in addresses.items():
                numbers[row, ADDRESS[what]] = address
        self._upload(out, numbers)

    def _look(self, what: str, tensors: Sequence[torch.Tensor | None]) -> bool:
        pointers: list[int] = []
        dtypes: list[torch.dtype | None] = []
        contiguous: list[bool] = []
        for tensor in tensors:
            if tensor is None:
                pointers.append(0)
                dtypes.append(None)
                contiguous.append(True)
            else:
                pointers.append(tensor.data_ptr())
                dtypes.append(tensor.dtype)
                contiguous.append(tensor.is_contiguous())
        return self._update(what, tensors, (pointers, dtypes, contiguous))

    def _update(self, what: str, tensors: Sequence[torch.Tensor | None], now: Seen) -> bool:
        """Bring the numbers up to date; False when nothing has changed."""
        pointers, dtypes, contiguous = now
        before = self._seen.get(what)
        plain = all(contiguous)
        if now == before and plain:
            return False
        first = ADDRESS[what]
        self._numbers[:, first] = pointers
        if before is None or dtypes != before[1]:
            self.dtypes |= dtype_set({d for d in dtypes if d is not None})
            self._numbers[:, first + 1] = [0 if d is None else dtype_code(d) for d in dtypes]
        self.strided[what] = {
            i: t for i, t in enumerate(tensors) if t is not None and not contiguous[i]
        }
        if not plain or before is None or contiguous != before[2]:
            self._numbers[:, first + 2] = [
                0 if o is None else o.data_ptr() for o in self._offset_rows
            ]
            for row, tensor in self.strided[what].items():
                self._numbers[row, first + 2] = self._strided_offsets(row, tensor)
        self._seen[what] = now
        return True

    def _strided_offsets(self, row: int, tensor: torch.Tensor) -> int:
        """Address of the row's offsets in the tensor's own memory order; made once per strides."""
        offsets = self._offset_rows[row]
        if offsets is None:
            return 0
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if reach >= 2**31 and offsets.dtype == torch.int32:
            raise ValueError("a strided view reaches beyond 2**31 elements of its storage")
        key = (row, tensor.stride())
        if key not in self._translated:
            places = torch.unravel_index(offsets.long(), tensor.shape)
            memory = torch.zeros_like(offsets, dtype=torch.int64)
            for place, stride in zip(places, tensor.stride(), strict=True):
                memory += place * stride
            self._translated[key] = memory.to(offsets.dtype)
        return self._translated[key].data_ptr()

    def _upload(
        self, out: torch.Tensor, numbers: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ) -> None:
        source = torch.from_numpy(numbers)
        if self.device.type != "cuda":
            out.copy_(source)
            return
        # A pinned buffer may be written again only after its copy ran; instead of waiting for it
        # another one is taken.
        free = [pair for pair in self._staging if pair[1].query()]  # type: ignore[no-untyped-call]
        if not free:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            free = [(torch.empty_like(source, pin_memory=True), event)]
            self._staging += free
        buffer, copied = free[0]
        buffer.copy_(source)
        out.copy_(buffer, non_blocking=True)
        copied.record(torch.cuda.current_stream(self.device))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one piece of memory, in whatever order."""
    expected = 1
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in dims:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
