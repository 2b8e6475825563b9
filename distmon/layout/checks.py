"""Checks of a list of shards before it is observed."""

from __future__ import annotations

from collections.abc import Sequence

from distmon.errors import LayoutError
from distmon.layout.shard import Shard


def check_devices(shards: Sequence[Shard]) -> None:
    """Raise LayoutError for parameters without storage, or on several devices."""
    for shard in shards:
        if shard.weight().is_meta:
            raise LayoutError(
                f"parameter {shard.name} is on the meta device: attach after it has storage"
            )
    devices = {shard.weight().device for shard in shards}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise LayoutError(
            f"the parameters of one process are on {len(devices)} devices ({names}); "
            "attach one monitor per device with `include`"
        )
