"""Find the finished native module, load it, and believe it only after it agreed with Python."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from distmon.native.build import MODULE, candidates, is_whole

log = logging.getLogger("distmon")

HOW_TO_BUILD = "`python -m distmon.native` builds it"


class NativeModule(Protocol):
    """The functions of the compiled file."""

    def locate_tensors(self, examples: list[tuple[torch.Tensor, int]]) -> bool:
        """Learn where a Python tensor keeps its C++ one, from examples with known addresses."""
        ...

    def read_places(
        self,
        parameters: list[torch.Tensor | None],
        names: list[str | None],
        of_grad: bool,
        neighbour: torch.Tensor,
        codes: bytes,
        numels: NDArray[np.int64],
        out: NDArray[np.int64],
    ) -> list[int]:
        """Fill `out` [rows, 3] with address, code and contiguity of weights or gradients.

        Row i is about `parameters[i]` or the tensor in its slot `names[i]`; no gradient is
        (0, -1, 1). `codes` has the code of each of torch's 256 possible dtype numbers, signed.
        Returns the rows that it left alone: no parameter given, a tensor without memory of its own,
        or one that has not the `numels[i]` elements that it should have on the neighbour's device.
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
        applied: NDArray[np.float64],
        sums: NDArray[np.float64],
        maxima: NDArray[np.float32],
        bins: NDArray[np.float64] | None,
    ) -> None:
        """Replace the sampled weight and gradient columns by those of all elements.

        Every tensor must fill one piece of memory. Releases the interpreter's lock.
        """
        ...

    def add_norm(self, gradient: torch.Tensor, cells: list[NDArray[np.float64] | None]) -> bool:
        """Add the norm of a gradient to every cell: the root of the sum of squares, and a count.

        False, and nothing is done, when it is not dense in the CPU's memory or a cell is not there.
        """
        ...


@dataclass(frozen=True)
class Status:
    """Whether the native module can be used here."""

    module: NativeModule | None
    path: Path | None
    reason: str
    """Why it cannot; empty when it can."""


def load() -> NativeModule | None:
    """The native module, or None. A file that cannot be used is named in one line of the log."""
    found = status()
    if found.module is None and found.path is not None:
        log.warning("the native module is not used: %s", found.reason)
    return found.module


def status() -> Status:
    """Look for the module and try it. Takes milliseconds, compiles nothing."""
    found = Status(None, None, f"it is not built; {HOW_TO_BUILD}")
    try:
        for path in candidates():
            found = _try(path)
            if found.module is not None:
                break
    except OSError as error:
        return Status(None, None, f"its folder cannot be read: {error}")
    return found


def _try(path: Path) -> Status:
    try:
        # Loading a file that was cut short can end the process, so its bytes are looked at first.
        if not is_whole(path):
            return Status(None, path, f"{path} is not whole; {HOW_TO_BUILD} again")
        loader = ExtensionFileLoader(MODULE, str(path))
        spec = spec_from_loader(MODULE, loader)
        assert spec is not None
        loaded = module_from_spec(spec)
        loader.exec_module(loaded)
        module = cast(NativeModule, loaded)
        _try_out(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Status(None, path, f"{path} cannot be used ({reason}); {HOW_TO_BUILD} again")
    return Status(module, path, "")


class _Holder(torch.Tensor):
    """Keeps a tensor in a slot, as subclasses that wrap others do."""

    __slots__ = ("held",)
    held: torch.Tensor


def _try_out(module: NativeModule) -> None:
    """Raise unless the module and Python see the same in a few tensors."""
    plain = torch.nn.Parameter(torch.ones(3, 5))
    plain.grad = torch.ones(5, 3).t()
    alone = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    holder = torch.ones(4).as_subclass(_Holder)
    holder.held = torch.ones(6)[2:]
    holder.requires_grad_()
    grad = torch.ones(4).as_subclass(_Holder)
    grad.held = torch.ones(8, dtype=torch.bfloat16)[::2]
    holder.grad = grad
    tensors = [plain, plain.grad, alone, holder, holder.held, grad, grad.held]
    if not module.locate_tensors([(t, cast(Any, t)._cdata) for t in tensors]):
        raise RuntimeError("this torch keeps its tensors in another way")
    parameters: list[torch.Tensor | None] = [plain, alone, holder, None]
    names = [None, None, "held", None]
    numbers = bytes(range(256))
    out, numels = np.zeros((4, 3), dtype=np.int64), np.array([15, 2, 4, 0])
    for of_grad, expected in (
        (False, [plain, alone, holder.held]),
        (True, [plain.grad, None, grad.held]),
    ):
        if module.read_places(parameters, names, of_grad, plain, numbers, numels, out) != [3]:
            raise RuntimeError("it does not read what it should")
        for row, tensor in zip(out, expected, strict=False):
            seen = (0, True) if tensor is None else (tensor.data_ptr(), tensor.is_contiguous())
            if (row[0], bool(row[2])) != seen:
                raise RuntimeError("it does not see what Python sees")
    if not out[0, 1] != out[2, 1]:
        raise RuntimeError("it does not tell dtypes apart")
