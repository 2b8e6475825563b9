"""Find a finished native module, and load it if it can be trusted and agrees with Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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


Missing = tuple[list[int], list[int]]
"""Rows whose weight, and whose gradient, Python has to place."""


class RowReader(Protocol):
    """Reads the samples of all parameters of a plan, one call for each phase of a step.

    Each call finds all tensors first. Where some cannot be found, or are not contiguous, it reads
    nothing and returns these rows; after `place` for each it is called again with `placed`.
    """

    def place(
        self,
        of_grad: bool,
        row: int,
        address: int,
        dense: int,
        code: int,
        offset_bytes: int,
        offsets: NDArray[np.integer[Any]] | None,
        run_offsets: NDArray[np.int64] | None,
        run_codes: NDArray[np.uint8] | None,
    ) -> None:
        """Place a tensor for the next call: its address, where all its elements lie side by side,
        and, unless it is contiguous, the offsets of its slots and runs in its memory."""
        ...

    def snapshot(self, placed: bool, threads: int) -> Missing | None:
        """Keep the sampled weights."""
        ...

    def measure(
        self,
        placed: bool,
        threads: int,
        bins_in_full: bool,
        words: int,
        count_bits: int,
        applied: NDArray[np.float64],
        sums: NDArray[np.float64],
        maxima: NDArray[np.float32],
        bins: NDArray[np.float64] | None,
        checksums: NDArray[np.int64],
    ) -> Missing | list[int]:
        """Fill every column of every row; return the rows that have no gradient.

        The bins of a row are packed into `words` words, `count_bits` for each count.
        Releases the interpreter's lock while it reads tensors in full, on up to `threads` threads.
        """
        ...

    def write_offsets(self, row: int, out: NDArray[np.int64]) -> None:
        """Write the offset of each used slot of a row to `out` [GROUPS x its width]."""
        ...

    def table_bytes(self) -> int:
        """Return the memory of the tables that the reader has made."""
        ...


class IdleLane(Protocol):
    """Counts steps that are not observed; see `distmon.runtime.idle_lane`.

    `before_step`, `after_step`, `check` and `step` take the arguments of the monitor's methods.
    """

    def take(self) -> dict[str, Any] | None:
        """Return what was counted, None for nothing, and pass all calls on from now on."""
        ...

    def open_until(
        self,
        completed: int,
        stride: int,
        limit: int,
        expects_optimizer: bool,
        in_phases: bool,
        since: float,
    ) -> None:
        """Count the steps after `completed` whose next one is before `limit`.

        `expects_optimizer`: pass on a step in which no optimizer has stepped. `in_phases`: measure
        the phases of the steps, the first of which has begun at `since`.
        """
        ...

    def mark(self, phase: int) -> bool:
        """Begin a phase; False when the steps are not counted here."""
        ...

    def mark_by_hook(self, phase: int) -> bool:
        """Do the same, unless the trainer has named the current phase."""
        ...

    def set_named(self, named: bool) -> None:
        """Set whether the trainer has named the current phase: hooks begin none until it ends."""
        ...

    def take_call_seconds(self) -> tuple[float, float]:
        """Return the time of the calls that were passed on, and the part of it in idle ones.

        Since it was last asked, and without the present call.
        """
        ...

    def call_is_idle(self) -> None:
        """Count the present call as an idle one."""
        ...

    def phase(self) -> int:
        """Return the current phase; -1 when steps are not counted here, or without phases."""
        ...


class GainHooks(Protocol):
    """Adds the norms of gradients to both sides of blocks, in the backward pass, without Python."""

    def hook(self, value: Any, block: int, side: int) -> bool:
        """Measure the gradient of a tensor, or of the first one in a tuple.

        False for one that Python has to find or to hook.
        """
        ...

    def arm(self, armed: bool) -> None: ...

    def take_seconds(self) -> float:
        """Return the time that the hooks took since the last call."""
        ...

    def clear(self) -> None:
        """Set all norms and counts to 0, and forget which tensors have hooks."""
        ...

    def read(self, out: NDArray[np.float64]) -> None:
        """Write norm and count on both sides of every block to `out` [blocks, 2, 2]."""
        ...

    def put(self, into: torch.Tensor, rows: NDArray[np.int64]) -> bool:
        """Write squared norm and count on both sides, and 1, to the row of every block.

        The other rows become 0. False where `into` is no float64 on the host.
        """
        ...


HookEntry = tuple[Callable[[], Any], int, Callable[..., Any], bool, tuple[Callable[[], Any], ...]]
"""A hook in torch's tables: a reference to its table, its key, the hook, whether it runs before the
others, and references to further tables that have its key."""


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

    def row_reader(
        self,
        places: PlaceReader,
        slots: int,
        offset_bytes: int,
        starts: NDArray[np.int64],
        widths: NDArray[np.int32],
        group_counts: NDArray[np.int32],
        offsets: NDArray[np.integer[Any]],
        value_bytes: int,
        snapshot: NDArray[np.floating[Any]],
        half_ulp: NDArray[np.float64],
        runs: int,
        run_bytes: int,
        first: NDArray[np.int64],
        run_offsets: NDArray[np.integer[Any]],
        run_codes: NDArray[np.uint8],
        numels: NDArray[np.int64],
        wanted: NDArray[np.uint8],
    ) -> RowReader:
        """Return a reader of the tensors of `places` by the tables of a plan.

        The tables are those of `csrc_triton.tables.RowTables` and of `GradientRuns`; `slots` is the
        length of `offsets` and `snapshot`. `wanted` has WHOLE_WEIGHT and WHOLE_GRAD where these are
        read in full. The reader keeps the snapshot, the counts and the runs, and makes a table of
        its own from `offsets`.
        """
        ...

    def add_norm(self, gradient: torch.Tensor, cells: list[NDArray[np.float64] | None]) -> bool:
        """Add the norm of a gradient to every cell: the root of the sum of squares, and a count.

        False, and nothing is done, when it is not dense in the CPU's memory or a cell is not there.
        """
        ...

    def sum_of_squares(self, tensor: torch.Tensor) -> float | None:
        """Return the sum of squares; None for a tensor that is not dense in the CPU's memory."""
        ...

    def digest(self, tensor: torch.Tensor, elements: int) -> tuple[float, int] | None:
        """Return the sum of squares, and a number for the bytes of the first elements.

        The number is 0 when these are all 0. None for a tensor that is not plain memory.
        """

    def switch_hooks(self, entries: tuple[HookEntry, ...], wanted: bool) -> None:
        """Put the hooks into their tables, as far as these exist, or remove them."""
        ...

    def farthest_jump(
        self,
        slots: int,
        matrices: int,
        kept: int,
        parameters: int,
        value_bytes: int,
        steps: float,
        floor: float,
        snapshot: NDArray[np.floating[Any]],
        begins: NDArray[np.int64],
        index: NDArray[np.int64],
        rows: NDArray[np.int64],
        sums: NDArray[np.float64],
        before: NDArray[np.float64],
        ratios: NDArray[np.float64],
    ) -> list[float]:
        """Return distance, expected distance and row; see `WeightJumps`.

        Matrix i has the elements `index[begins[i]:begins[i + 1]]` of `snapshot` and row `rows[i]`.
        `before` and `ratios`, its elements and update ratio then, are replaced.
        """
        ...

    def idle_lane(
        self,
        fallback: tuple[Callable[..., None], ...],
        optimizers: int,
        most_losses: int,
        kept_phases: int,
        optimizer_phase: int,
        other_phase: int,
    ) -> IdleLane:
        """Return a lane that passes calls on to `fallback`, in the order of its methods.

        The last one is called after a step that it has counted when the next one is at the limit.
        An optimizer step is counted for up to `optimizers` in each step. The phases of the last
        `kept_phases` steps are kept; those with a number are the one during and the one after an
        optimizer step.
        """
        ...

    def gain_hooks(
        self,
        blocks: int,
        fallback: Callable[[torch.Tensor, list[tuple[int, int]]], None],
    ) -> GainHooks:
        """Return hooks for so many blocks.

        `fallback` is called for a gradient that they cannot read, with blocks and sides.
        """
        ...


WHOLE_WEIGHT, WHOLE_GRAD = 1, 2
"""Bits of `wanted` in `row_reader`."""


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
