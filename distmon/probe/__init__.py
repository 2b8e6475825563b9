"""From samples to rows: read the weights before and after a step and fill the row columns."""

from distmon.probe.rows import Rows
from distmon.probe.torch_twin import TorchProbe

__all__ = ["Rows", "TorchProbe"]
