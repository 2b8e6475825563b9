"""Match the device that this process uses with one that the management library lists.

CUDA numbers devices in a different order from NVML (fastest first, by default) and only the visible
ones, so devices are matched by UUID and not by index.
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
    """Handle of the whole GPU: its own, or of its parent for a slice."""
    board_uuid: str
    bus_id: str = ""

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice."""
        return self.uuid != self.board_uuid


@dataclass(frozen=True)
class ComputeDevice:
    """The device of this process: torch's index, and what is known about it."""

    index: int
    uuid: str | None
    """UUID from torch, with or without a prefix; None when torch does not have it."""
    visible: str | None
    """List of visible devices from the environment; None when not set."""
    order_is_bus: bool
    """Whether devices are numbered by PCI bus, not fastest first."""


def compute_device(
    index: int, properties: object, environ: Mapping[str, str], amd: bool = False
) -> ComputeDevice:
    """Describe device `index` from torch's `properties` and the environment."""
    variables = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")[0 if amd else 1 :]
    uuid = getattr(properties, "uuid", None)
    return ComputeDevice(
        index=index,
        uuid=None if uuid is None else str(uuid),
        visible=next((environ[name] for name in variables if name in environ), None),
        order_is_bus=not amd and environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
    )


def match(
    listed: Sequence[ListedDevice], wanted: ComputeDevice, unresponsive: int = 0
) -> ListedDevice | str:
    """Return the listed device that matches, or one sentence why none can be chosen for sure.

    `unresponsive` is the number of GPUs that do not respond and are not in `listed`.
    """
    entry = _visible_entry(wanted)
    if wanted.uuid is not None:
        found = _by_uuid(listed, wanted.uuid)
    elif entry.lower().startswith(_PREFIXES):
        found = _by_uuid(listed, entry)
    else:
        found = _by_index(listed, entry, wanted, unresponsive)
    return found if isinstance(found, str) else _whole_or_slice(found, listed, entry)


def _by_uuid(listed: Sequence[ListedDevice], uuid: str) -> ListedDevice | str:
    """Match by UUID, which may be abbreviated and with or without prefix."""
    exact = [d for d in listed if bare(d.uuid) == bare(uuid)]
    found = exact or [d for d in listed if _abbreviates(uuid, d.uuid)]
    if len(found) > 1:
        return f"{len(found)} devices have a UUID that begins with {uuid}"
    if not found:
        return f"{uuid} is not among the listed devices ({_names(listed)})"
    return found[0]


def _by_index(
    listed: Sequence[ListedDevice], entry: str, wanted: ComputeDevice, unresponsive: int
) -> ListedDevice | str:
    """Match by index, only where there is one GPU or the order is known."""
    boards = sorted((d for d in listed if not d.is_slice), key=lambda d: d.bus_id.lower())
    if len(boards) == 1 and unresponsive == 0:
        return boards[0]
    known_order = wanted.order_is_bus and unresponsive == 0 and len(boards) == len(listed)
    if known_order and entry.isdigit() and int(entry) < len(boards):
        return boards[int(entry)]
    return (
        f"torch does not report the UUID of device {wanted.index}, and its index does not identify "
        f"it among {len(boards) + unresponsive} GPUs: set CUDA_VISIBLE_DEVICES to its UUID, or "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )


def _whole_or_slice(
    device: ListedDevice, listed: Sequence[ListedDevice], entry: str
) -> ListedDevice | str:
    """Resolve a board to its MIG slice: CUDA may report the board's UUID for a slice."""
    slices = [d for d in listed if d.is_slice and d.board_uuid == device.uuid]
    named = [d for d in slices if entry.lower().startswith("mig-") and _abbreviates(entry, d.uuid)]
    if not slices:
        return device
    for candidates in (named, slices):
        if len(candidates) == 1:
            return candidates[0]
    return (
        f"{device.uuid} has {len(slices)} MIG devices and it is unknown which one is used: set "
        "CUDA_VISIBLE_DEVICES to its MIG- UUID"
    )


def _visible_entry(wanted: ComputeDevice) -> str:
    """Return this device's entry in the list of visible devices; its index without a list."""
    if wanted.visible is None:
        return str(wanted.index)
    entries = [entry.strip() for entry in wanted.visible.split(",")]
    return entries[wanted.index] if wanted.index < len(entries) else ""


def _names(listed: Sequence[ListedDevice]) -> str:
    return ", ".join(device.uuid for device in listed) or "none"


def _abbreviates(short: str, uuid: str) -> bool:
    """Return whether `short` is a prefix of the UUID and of the same kind, GPU or slice."""
    kind = short.lower()[:4]
    same_kind = kind not in _PREFIXES or uuid.lower().startswith(kind)
    return bare(short) != "" and same_kind and bare(uuid).startswith(bare(short))


def bare(uuid: str) -> str:
    """Return the UUID in lower case without `GPU-` or `MIG-`, as torch reports it."""
    text = uuid.strip().lower()
    return text[4:] if text.startswith(_PREFIXES) else text
