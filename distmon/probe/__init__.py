"""From samples to rows: read the weights before and after a step and fill the row columns."""

from distmon.probe.backend import Probe, choose_probe
from distmon.probe.rows import Rows
from distmon.probe.torch_probe import TorchProbe

__all__ = ["Probe", "Rows", "TorchProbe", "choose_probe"]
