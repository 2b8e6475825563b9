"""Parameters that are whole on every rank that has them: no wrapper, or DDP."""

from __future__ import annotations

import torch

from distmon.layout.shard import Everything, Shard


def plain_shard(name: str, parameter: torch.Tensor) -> Shard:
    """The shard of an ordinary parameter."""
    strided = torch.strided

    # Called for every parameter at every observation: `is` costs a third of `==`.
    def is_sparse() -> bool:
        gradient = parameter.grad
        return gradient is not None and gradient.layout is not strided

    def grad() -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is None or gradient.layout is strided:
            return gradient
        return None

    return Shard(
        name=name,
        global_shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        region=Everything(),
        weight=lambda: parameter,
        grad=grad,
        gate=parameter,
        grad_is_unreadable=is_sparse,
        parameters=(parameter,),
        paths=("", "grad"),
        spread="whole",
    )
