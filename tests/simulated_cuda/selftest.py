"""`python -m distmon.selftest` on the simulated device: python -m simulated_cuda.selftest."""

from __future__ import annotations

import sys

from simulated_cuda import device

RANK_PROGRAM = "simulated_cuda.selftest_rank"

if __name__ == "__main__":
    device.install()
    from distmon.selftest.__main__ import main

    sys.exit(main(rank_program=RANK_PROGRAM))
