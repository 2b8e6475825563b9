"""Ways to watch a training, one file each, all used alike."""

from distmon_benchmarks.contenders.contender import Contender, Norms, Session
from distmon_benchmarks.contenders.registry import CONTENDERS, find

__all__ = ["CONTENDERS", "Contender", "Norms", "Session", "find"]
