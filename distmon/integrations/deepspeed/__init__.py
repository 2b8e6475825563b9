"""distmon for DeepSpeed: a `"distmon"` block in the DeepSpeed config enables it.

There are four ways to use it: `initialize(...)` instead of `deepspeed.initialize(...)`; `enable()`
once, before the first step; `torchrun -m distmon.deepspeed train.py ...` without changing the
script; or `attach(engine)` for one engine.
"""

from distmon.integrations.deepspeed.attach_engine import attach, detach
from distmon.integrations.deepspeed.auto_attach import disable, enable
from distmon.integrations.deepspeed.wrapped_initialize import initialize
from distmon.layout.deepspeed import skip_builds

__all__ = ["attach", "detach", "disable", "enable", "initialize", "skip_builds"]
