"""Run one of the benchmarks of this folder: `python -m benchmarks.scale planning`."""

from __future__ import annotations

import sys

from benchmarks.scale import __doc__ as usage
from benchmarks.scale import attaching, host_time, parallelism, planning

COMMANDS = {
    "planning": planning.main,
    "attach": attaching.main,
    "parallelism": parallelism.main,
    "host-time": host_time.main,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(usage)
    COMMANDS[sys.argv[1]](sys.argv[2:])
