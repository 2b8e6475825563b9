"""`attach` for a loop with Hugging Face accelerate.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = distmon.integrations.accelerate.attach(accelerator)

Steps, losses and gradient norms are taken from the loop; nothing else has to be called.
"""

from __future__ import annotations

from typing import Any

from distmon.attach import attach as attach_to
from distmon.errors import LayoutError
from distmon.integrations.auto.following import Following
from distmon.integrations.auto.step_report import AutoStep
from distmon.monitor import Monitor
from distmon.runtime.disabled import DisabledMonitor


def attach(
    accelerator: Any,
    model: Any = None,
    optimizer: Any = None,
    config: Any = None,
    **options: Any,
) -> Monitor | DisabledMonitor:
    """Monitor what `accelerator.prepare` has prepared. Call it on every rank, after `prepare`.

    `model` and `optimizer` choose among several. `config` and `options` are those of
    `distmon.attach`. The returned monitor completes its steps by itself; `close()` it at the end.
    """
    models = [*accelerator._models] if model is None else [model]
    optimizers = [*accelerator._optimizers] if optimizer is None else [optimizer]
    if len(models) != 1 or not optimizers:
        raise LayoutError(
            f"the accelerator has prepared {len(models)} models and {len(optimizers)} optimizers; "
            "pass the model and the optimizer to attach"
        )
    monitor = attach_to(models[0], optimizers, config, **options)
    if isinstance(monitor, Monitor):
        Following(AutoStep(monitor, optimizers))
    return monitor
