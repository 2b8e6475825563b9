"""One rank of a DDP training on a host of its own; writes losses and the longest step.

Settings come from the environment: RANK, WORLD_SIZE, MASTER_ADDR and those of `Settings`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

FOLDER = Path(os.environ["HOSTS_FOLDER"])
STEPS = int(os.environ["HOSTS_STEPS"])
MONITORED = os.environ["HOSTS_MONITORED"] == "1"
SKEW_S = float(os.environ.get("HOSTS_SKEW_S", "0"))
SLOW_S = float(os.environ.get("HOSTS_SLOW_S", "0"))
DIES_AT = int(os.environ.get("HOSTS_DIES_AT", "0"))
TIMEOUT_S = float(os.environ.get("HOSTS_TIMEOUT_S", "30"))

if SKEW_S:
    _real = time.time
    time.time = lambda: _real() + SKEW_S  # the clock of this host is wrong


def main() -> None:
    """Train, save each step, and continue after a restart."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    inner = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
    saved = FOLDER / "checkpoint.pt"
    state = torch.load(saved, weights_only=False) if saved.exists() else None
    if state is not None:
        inner.load_state_dict(state["model"])
    model = DistributedDataParallel(inner)
    monitor = None
    if MONITORED:
        import distmon

        settings = {"interval": 2, "first_observation": 2, "sinks": ["jsonl"], "budget": None}
        monitor = distmon.attach(model, optimizer, settings, run_dir=FOLDER / "run")
        if state is not None:
            monitor.load_state_dict(state["monitor"])
    first = 0 if state is None else state["step"]
    losses, longest, error, begin = {}, 0.0, "", time.monotonic()
    try:
        for step in range(first + 1, STEPS + 1):
            begin = time.monotonic()
            optimizer.zero_grad()
            data = torch.full((4, 32), 0.01 * (step % 7 + rank))
            loss = model(data).square().mean()
            if SLOW_S:
                time.sleep(SLOW_S)
            loss.backward()
            optimizer.step()
            if monitor is not None:
                monitor.step(loss=loss)
            longest = max(longest, time.monotonic() - begin)
            losses[step] = float(loss.detach())
            if rank == 0 and step % 5 == 0:
                kept = {"model": inner.state_dict(), "step": step}
                kept["monitor"] = monitor.state_dict() if monitor is not None else {}
                torch.save(kept, FOLDER / "staged.pt")
                os.replace(FOLDER / "staged.pt", saved)
            if step == DIES_AT and first == 0:
                os._exit(17)
            time.sleep(0.02)
    except RuntimeError as failed:  # of the training's own collective
        longest = max(longest, time.monotonic() - begin)
        error = str(failed).splitlines()[0]
    closing = time.monotonic()
    if monitor is not None:
        monitor.close()
    result = {
        "losses": losses,
        "longest_s": longest,
        "close_s": time.monotonic() - closing,
        "error": error,
        "first": first,
        "world": world,
    }
    name = f"rank{rank}.json" if not first else f"rank{rank}.restarted.json"
    (FOLDER / name).write_text(json.dumps(result))
    if error:  # torchrun restarts ranks that fail, not those that end
        sys.exit(1)


if __name__ == "__main__":
    main()
