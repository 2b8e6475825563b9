"""distmon: watches distributed PyTorch training from the inside."""

import random
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distmon.guarded_log import guard_logger
from distmon.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from distmon.attach import attach
    from distmon.config import MonitorConfig
    from distmon.errors import DistmonError
    from distmon.monitor import Monitor
    from distmon.record.record import Record
    from distmon.rules import rule
    from distmon.rules.alert import Alert
    from distmon.runs.reader import Run, read_run
    from distmon.runtime.actions import TrainingStopped

guard_logger("distmon")

__version__ = "0.2.0"
__all__ = [
    "Alert",
    "DistmonError",
    "Monitor",
    "MonitorConfig",
    "Record",
    "Run",
    "TrainingStopped",
    "attach",
    "read_run",
    "rule",
]
# rich draws a number when it is imported: a training that is seeded would get others after that.
_drawn = random.getstate()
import_module("rich.style")
random.setstate(_drawn)

__getattr__ = lazy_exports(
    __name__,
    {
        "Alert": "distmon.rules.alert",
        "DistmonError": "distmon.errors",
        "Monitor": "distmon.monitor",
        "MonitorConfig": "distmon.config",
        "Record": "distmon.record.record",
        "Run": "distmon.runs.reader",
        "TrainingStopped": "distmon.runtime.actions",
        "attach": "distmon.attach",
        "read_run": "distmon.runs.reader",
        "rule": "distmon.rules",
    },
)


class _Package(ModuleType):
    """This package: `distmon.attach` stays the function when the module of that name is loaded."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "attach" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
