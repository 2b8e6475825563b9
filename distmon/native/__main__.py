"""`python -m distmon.native`: compile the loops of this package for the torch that is installed."""

from __future__ import annotations

import sys

from distmon.errors import DistmonError
from distmon.native.build import build
from distmon.native.loading import status


def main() -> int:
    """Build unless a working file is there. Exit code 2 when it cannot be built."""
    before = status()
    if before.module is not None:
        print(f"distmon: the native module is built: {before.path}")
        return 0
    try:
        result = build()
    except DistmonError as error:
        print(f"distmon: {error}", file=sys.stderr)
        return 2
    after = status()
    if after.module is None:
        print(f"distmon: the native module was built, but {after.reason}", file=sys.stderr)
        return 2
    print(f"distmon: built the native module in {result.seconds:.1f} s: {result.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
