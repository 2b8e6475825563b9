"""Who holds which piece of which parameter. The only part that knows about parallelism."""

from distmon.layout.capture import capture
from distmon.layout.shard import Everything, Region, Shard, absent_shard

__all__ = ["Everything", "Region", "Shard", "absent_shard", "capture"]
