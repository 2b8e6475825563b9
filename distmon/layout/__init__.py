"""Which rank holds which shard of which parameter. Only this package knows about parallelism."""

from distmon.layout.activations import local_part
from distmon.layout.capture import capture
from distmon.layout.modules import (
    NamedModule,
    class_of,
    named_modules,
    parameters_reduced_during_backward,
    written_module,
)
from distmon.layout.shard import Everything, Region, Shard, absent_shard

__all__ = [
    "Everything",
    "NamedModule",
    "Region",
    "Shard",
    "absent_shard",
    "capture",
    "class_of",
    "local_part",
    "named_modules",
    "parameters_reduced_during_backward",
    "written_module",
]
