"""`distmon.deepspeed`: the public name of `distmon.integrations.deepspeed`.

`torchrun -m distmon.deepspeed train.py ...` runs a DeepSpeed script without an edit.
"""

import sys

from distmon.integrations.deepspeed import (
    attach,
    detach,
    disable,
    enable,
    initialize,
    skip_builds,
)

__all__ = ["attach", "detach", "disable", "enable", "initialize", "skip_builds"]

if __name__ == "__main__":
    from distmon.integrations.deepspeed.run_script import main

    sys.exit(main(sys.argv[1:]))
