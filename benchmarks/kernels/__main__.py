"""Print everything about the kernels: `python -m benchmarks.kernels`."""

from __future__ import annotations

import argparse
import platform

import torch
import triton

from benchmarks import kernels
from benchmarks.kernels.gpu_time import gpu_times
from benchmarks.kernels.host_time import host_time
from benchmarks.kernels.resources import bytes_table, resource_table

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels",
        description=kernels.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="skip the compilation")
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, triton {triton.__version__}, {platform.machine()}, "
        f"Python {platform.python_version()}"
    )
    if not arguments.quick:
        resource_table()
    bytes_table()
    host_time()
    gpu_times()
