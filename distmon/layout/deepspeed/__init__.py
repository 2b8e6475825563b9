"""The layout of a DeepSpeed engine: which shard of each parameter its optimizer steps here.

It is read from attributes of the engine. DeepSpeed itself is imported only by `package`, on demand.
"""

from distmon.layout.deepspeed.engine import EngineLayout
from distmon.layout.deepspeed.package import import_deepspeed, skip_builds

__all__ = ["EngineLayout", "import_deepspeed", "skip_builds"]
