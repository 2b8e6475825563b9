"""One rank of the checks of the transports: trains, and writes its metrics to a file.

python -m distmon.selftest.rank FOLDER TRANSPORT DEVICE_TYPE
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from distmon.selftest.checks import compared_metrics
from distmon.selftest.transports import RANKS, one_for_both

_TIMEOUT: Final = timedelta(seconds=120)


def main(arguments: Sequence[str], device_backend: str | None = None) -> None:
    """Train as the rank of the environment; `device_backend` is torch's own for the device."""
    folder, transport, kind = arguments
    rank = int(os.environ["RANK"])
    device, backend = torch.device(kind), "gloo"
    if kind != "cpu":
        shared = one_for_both(device)
        device = torch.device(kind, 0 if shared else rank)
        torch.accelerator.set_device_index(device.index)
        if not shared:
            own = device_backend or dist.get_default_backend_for_device(kind)
            backend = f"cpu:gloo,{kind}:{own}"
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/store", RANKS),  # type: ignore[attr-defined]
        rank=rank,
        world_size=RANKS,
        timeout=_TIMEOUT,
    )
    run_dir = Path(folder) / f"run-{rank}"
    metrics = compared_metrics(device, transport=transport, run_dir=run_dir)
    (Path(folder) / f"rank{rank}").write_text(json.dumps(metrics))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
