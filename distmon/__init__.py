"""distmon: watches distributed PyTorch training from the inside."""

from distmon.actions import TrainingStopped
from distmon.alert import Alert
from distmon.attaching import attach
from distmon.config import MonitorConfig
from distmon.errors import DistmonError
from distmon.monitor import Monitor
from distmon.reading import Run, read_run
from distmon.record import Record
from distmon.rules import rule

__version__ = "0.1.0"
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
