"""Which device of the management library is the one that this process computes on.

CUDA counts devices in another order than NVML (fastest first, by default) and only the visible
ones, so an index says nothing. The UUID does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_PREFIXES: Final = ("gpu-", "mig-")


@dataclass(frozen=True)
class ListedDevice:
    """A GPU, or a MIG slice of one, as the management library lists it."""

    uuid: str
    handle: Any
    board: Any
    """Handle of the whole GPU: of a slice its parent's, of a GPU its own."""
    board_uuid: str
    bus_id: str = ""

    @property
    def is_slice(self) -> bool:
        """Whether it is a part of a GPU."""
        return self.uuid != self.board_uuid


@dataclass(frozen=True)
class ComputeDevice:
    """The device of this process: its index as torch counts, and what is known of it."""

    index: int
    uuid: str | None
    """As torch gives it, with or without a prefix; None when torch does not know."""
    visible: str | None
    """The list of visible devices from the environment, None when there is none."""
    order_is_bus: bool
    """Whether indices count devices in the order of their PCI bus, not fastest first."""


def compute_device(
    index: int, properties: object, environ: Mapping[str, str], amd: bool = False
) -> ComputeDevice:
    """What is known of device `index`; `properties` are torch's, for instance its UUID."""
    variables = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")[0 if amd else 1 :]
    uuid = getattr(properties, "uuid", None)
    return ComputeDevice(
        index=index,
        uuid=None if uuid is None else str(uuid),
        visible=next((environ[name] for name in variables if name in environ), None),
        order_is_bus=not amd and environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
    )


def match(
    listed: Sequence[ListedDevice], wanted: ComputeDevice, silent: int = 0
) -> ListedDevice | str:
    """The listed device that `wanted` is, or one sentence why that cannot be said. No guesses.

    `silent` GPUs are there but do not answer, so they are not in `listed`.
    """
    entry = _visible_entry(wanted)
    if wanted.uuid is not None:
        found = _by_uuid(listed, wanted.uuid)
    elif entry.lower().startswith(_PREFIXES):
        found = _by_uuid(listed, entry)
    else:
        found = _by_index(listed, entry, wanted, silent)
    return found if isinstance(found, str) else _whole_or_slice(found, listed, entry)


def _by_uuid(listed: Sequence[ListedDevice], uuid: str) -> ListedDevice | str:
    """By UUID, which may be abbreviated as in CUDA_VISIBLE_DEVICES and with or without prefix."""
    exact = [d for d in listed if bare(d.uuid) == bare(uuid)]
    found = exact or [d for d in listed if _abbreviates(uuid, d.uuid)]
    if len(found) > 1:
        return f"{len(found)} devices have a UUID that begins with {uuid}"
    if not found:
        return f"{uuid} is not among the devices that answer ({_names(listed)})"
    return found[0]


def _by_index(
    listed: Sequence[ListedDevice], entry: str, wanted: ComputeDevice, silent: int
) -> ListedDevice | str:
    """An index decides only where there is one GPU, or where the order is known."""
    boards = sorted((d for d in listed if not d.is_slice), key=lambda d: d.bus_id.lower())
    if len(boards) == 1 and silent == 0:
        return boards[0]
    known_order = wanted.order_is_bus and silent == 0 and len(boards) == len(listed)
    if known_order and entry.isdigit() and int(entry) < len(boards):
        return boards[int(entry)]
    return (
        f"torch does not tell the UUID of device {wanted.index}, there are "
        f"{len(boards) + silent} GPUs, and an index does not say which of them it is: name it in "
        "CUDA_VISIBLE_DEVICES by its UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )


def _whole_or_slice(
    device: ListedDevice, listed: Sequence[ListedDevice], entry: str
) -> ListedDevice | str:
    """CUDA may give the UUID of the board although it computes on a slice of it."""
    slices = [d for d in listed if d.is_slice and d.board_uuid == device.uuid]
    named = [d for d in slices if entry.lower().startswith("mig-") and _abbreviates(entry, d.uuid)]
    if not slices:
        return device
    for candidates in (named, slices):
        if len(candidates) == 1:
            return candidates[0]
    return (
        f"{device.uuid} is divided into {len(slices)} MIG devices and nothing says which one is "
        "used: name it in CUDA_VISIBLE_DEVICES by its MIG- UUID"
    )


def _visible_entry(wanted: ComputeDevice) -> str:
    """What the environment calls this device; without a list, its index."""
    if wanted.visible is None:
        return str(wanted.index)
    entries = [entry.strip() for entry in wanted.visible.split(",")]
    return entries[wanted.index] if wanted.index < len(entries) else ""


def _names(listed: Sequence[ListedDevice]) -> str:
    return ", ".join(device.uuid for device in listed) or "none does"


def _abbreviates(short: str, uuid: str) -> bool:
    """`GPU-8a` stands for every UUID that begins so, but never for a slice, and `MIG-` the same."""
    kind = short.lower()[:4]
    same_kind = kind not in _PREFIXES or uuid.lower().startswith(kind)
    return bare(short) != "" and same_kind and bare(uuid).startswith(bare(short))


def bare(uuid: str) -> str:
    """The UUID in small letters without `GPU-` or `MIG-`: torch gives it so."""
    text = uuid.strip().lower()
    return text[4:] if text.startswith(_PREFIXES) else text
