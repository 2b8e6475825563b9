"""distmon for DeepSpeed: a `"distmon"` block in the DeepSpeed config turns it on.

Three ways in: `initialize(...)` in place of `deepspeed.initialize(...)`; `enable()` once, before
the first step; or no edit at all, `torchrun -m distmon.deepspeed train.py ...`. Whoever prefers to
do it by hand calls `attach(engine)`.
"""

from distmon.deepspeed.attaching import attach, detach
from distmon.deepspeed.everywhere import disable, enable
from distmon.deepspeed.initializing import initialize
from distmon.layout.deepspeed import skip_builds

__all__ = ["attach", "detach", "disable", "enable", "initialize", "skip_builds"]
