"""distmon: watches distributed PyTorch training from the inside."""

from distmon.attach import attach
from distmon.config import MonitorConfig
from distmon.errors import DistmonError
from distmon.monitor import Monitor
from distmon.record.record import Record
from distmon.rules import rule
from distmon.rules.alert import Alert
from distmon.runs.reader import Run, read_run
from distmon.runtime.actions import TrainingStopped

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
