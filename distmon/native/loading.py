"""Find a finished native module, and load it if it can be trusted and agrees with Python."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.address_layout import DTYPE_CODES
from distmon.native.build import NativeBuildError, candidates, is_complete, places_to_look
from distmon.native.compiling import MODULE
from distmon.native.trust import why_not_trusted

log = logging.getLogger("distmon")

HOW_TO_BUILD = "`python -m distmon.native` builds it"


class PlaceReader(Protocol):
    """Reads where the weights or gradients of some parameters lie, into the array given for it.

    Row i is [address, dtype code, contiguous]; a missing gradient is (0, -1, 1). Both return the
    rows that they left unchanged, which Python has to read: not a strided tensor with memory of its
    own, no dtype that kernels read, or not the elements on the device that were asked for.
    """

    def read_weights(self) -> list[int]: ...

    def read_grads(self) -> list[int]: ...


class NativeModule(Protocol):
    """The functions of the compiled file. They raise Python exceptions only."""

    def place_reader(
        self,
        parameters: Sequence[torch.Tensor | None],
        attributes: Sequence[str | None],
        device: torch.device,
        numels: NDArray[np.int64],
        out: NDArray[np.int64],
    ) -> PlaceReader:
        """Return a reader of `parameters[i]` and its gradient, or of what their slot
        `attributes[i]` holds, that writes to `out` [rows, 3].

        Expects `numels[i]` elements on `device`.
        """
        ...

    def take_snapshot(
        self,
        rows: int,
        slots: int,
        offset_bytes: int,
        value_bytes: int,
        addresses: NDArray[np.int64],
        starts: NDArray[np.int64],
        widths: NDArray[np.int32],
        group_counts: NDArray[np.int32],
        snapshot: NDArray[np.floating[Any]],
    ) -> None:
        """Write the sampled weights into the used slots of `snapshot`.

        The tables are those of `csrc_triton.tables.RowTables`, in the CPU's memory; `slots` is the
        length of `snapshot`.
        """
        ...

    def fill_sampled_rows(
        self,
        rows: int,
        slots: int,
        offset_bytes: int,
        value_bytes: int,
        addresses: NDArray[np.int64],
        starts: NDArray[np.int64],
        widths: NDArray[np.int32],
        group_counts: NDArray[np.int32],
        snapshot: NDArray[np.floating[Any]],
        widest: int,
        half_ulp: NDArray[np.float64],
        multipliers: NDArray[np.int64],
        applied: NDArray[np.float64],
        sums: NDArray[np.float64],
        maxima: NDArray[np.float32],
        bins: NDArray[np.float64] | None,
        checksums: NDArray[np.int64],
    ) -> None:
        """Fill every column of every row; `multipliers` are the checksum's, one for each slot of
        the widest row."""
        ...

    def fill_exact_columns(
        self,
        threads: int,
        rows: int,
        addresses: NDArray[np.int64],
        numels: NDArray[np.int64],
        wanted: NDArray[np.uint8],
        applied: NDArray[np.float64],
        sums: NDArray[np.float64],
        maxima: NDArray[np.float32],
        bins: NDArray[np.float64] | None,
    ) -> None:
        """Replace sampled columns by those of all elements.

        `wanted` has WHOLE_WEIGHT and WHOLE_GRAD where these are read. Every tensor must be dense in
        memory. Releases the interpreter's lock.
        """
        ...

    def fill_gradient_runs(
        self,
        rows: int,
        runs: int,
        offset_bytes: int,
        addresses: NDArray[np.int64],
        first: NDArray[np.int64],
        offsets: NDArray[np.integer[Any]],
        codes: NDArray[np.uint8],
        applied: NDArray[np.float64],
        sums: NDArray[np.float64],
        maxima: NDArray[np.float32],
    ) -> None:
        """Replace the gradient columns of rows with runs; the tables are of `GradientRuns`."""
        ...

    def add_norm(self, gradient: torch.Tensor, cells: list[NDArray[np.float64] | None]) -> bool:
        """Add the norm of a gradient to every cell: the root of the sum of squares, and a count.

        False, and nothing is done, when it is not dense in the CPU's memory or a cell is not there.
        """
        ...


WHOLE_WEIGHT, WHOLE_GRAD = 1, 2
"""Bits of `fill_exact_columns`."""


@dataclass(frozen=True)
class Status:
    """Whether the native module can be used here."""

    module: NativeModule | None
    path: Path | None
    """The file that is used, or refused."""
    reason: str
    """Why it cannot be used; empty when it can."""


def load() -> NativeModule | None:
    """Return the native module, or None after one line in the log about a file that is refused."""
    found = status()
    if found.module is None and found.path is not None:
        log.warning("the native module is not used: %s", found.reason)
    return found.module


def status() -> Status:
    """Look for the module and try it. Takes milliseconds, compiles nothing, never raises."""
    found = Status(None, None, f"it is not built; {HOW_TO_BUILD}")
    try:
        for path in chain.from_iterable(map(candidates, places_to_look())):
            found = _try(path)
            if found.module is not None:
                break
    except NativeBuildError as error:
        return found if found.path else Status(None, None, str(error))
    except OSError as error:
        return found if found.path else Status(None, None, f"its folder cannot be read: {error}")
    return found


def _try(path: Path) -> Status:
    try:
        # Resolved once: what is checked is what is loaded, wherever links point to meanwhile.
        real = path.resolve(strict=True)
        distrusted = why_not_trusted(real)
        if distrusted is not None:
            return Status(None, path, f"{path} is not loaded: {distrusted}")
        # Loading a file that was cut short can end the process.
        if not is_complete(real):
            return Status(None, path, f"{path} is incomplete; {HOW_TO_BUILD} again")
        loader = ExtensionFileLoader(MODULE, str(real))
        spec = spec_from_loader(MODULE, loader)
        assert spec is not None
        loaded = module_from_spec(spec)
        loader.exec_module(loaded)
        module = cast(NativeModule, loaded)
        check_against_python(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Status(None, path, f"{path} cannot be used ({reason}); {HOW_TO_BUILD} again")
    return Status(module, path, "")


class _Holder(torch.Tensor):
    """Holds a tensor in a slot, as subclasses that wrap others do."""

    __slots__ = ("held",)
    held: torch.Tensor


def check_against_python(module: NativeModule) -> None:
    """Raise unless the module reads a few tensors as Python does."""
    plain = torch.nn.Parameter(torch.ones(3, 5))
    plain.grad = torch.ones(5, 3).t()
    alone = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    holder = torch.ones(4).as_subclass(_Holder)
    holder.held = torch.ones(6)[2:]
    holder.requires_grad_()
    grad = torch.ones(4).as_subclass(_Holder)
    grad.held = torch.ones(8, dtype=torch.bfloat16)[::2]
    holder.grad = grad
    out, numels = np.zeros((4, 3), dtype=np.int64), np.array([15, 2, 4, 0])
    reader = module.place_reader(
        [plain, alone, holder, None], [None, None, "held", None], plain.device, numels, out
    )
    for read, expected in (
        (reader.read_weights, [plain, alone, holder.held]),
        (reader.read_grads, [plain.grad, None, grad.held]),
    ):
        if read() != [3]:
            raise RuntimeError("it does not read what it should")
        for row, tensor in zip(out.tolist(), expected, strict=False):
            place = (0, -1, 1)
            if tensor is not None:
                code = DTYPE_CODES[tensor.dtype]
                place = (tensor.data_ptr(), code, int(tensor.is_contiguous()))
            if tuple(row) != place:
                raise RuntimeError("it does not see what Python sees")
