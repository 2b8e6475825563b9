"""Who holds which piece of which parameter. The only part that knows about parallelism."""

from distmon.layout.capture import capture
from distmon.layout.shard import Everything, Region, Shard

__all__ = ["Everything", "Region", "Shard", "capture"]
