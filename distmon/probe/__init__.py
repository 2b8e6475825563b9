"""From samples to rows: read the weights before and after a step and fill the row columns."""

from typing import TYPE_CHECKING

from distmon.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from distmon.probe.backend import Probe, choose_probe
    from distmon.probe.rows import Rows
    from distmon.probe.torch_probe import TorchProbe

__all__ = ["Probe", "Rows", "TorchProbe", "choose_probe"]
__getattr__ = lazy_exports(
    __name__,
    {
        "Probe": "distmon.probe.backend",
        "choose_probe": "distmon.probe.backend",
        "Rows": "distmon.probe.rows",
        "TorchProbe": "distmon.probe.torch_probe",
    },
)
