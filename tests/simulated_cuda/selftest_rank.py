"""One rank of the self-test's transport checks, with a simulated device."""

from __future__ import annotations

import sys

from simulated_cuda import device

if __name__ == "__main__":
    device.install()
    from distmon.selftest.rank import main
    from simulated_cuda import collectives

    collectives.register()
    main(sys.argv[1:], device_backend=collectives.NAME)
