"""The layout of a DeepSpeed engine: which part of which parameter its optimizer steps here.

It is read from attributes of the engine; DeepSpeed is imported when asked for, by `package`.
"""

from distmon.layout.deepspeed.engine import EngineLayout
from distmon.layout.deepspeed.package import import_deepspeed, skip_builds

__all__ = ["EngineLayout", "import_deepspeed", "skip_builds"]
