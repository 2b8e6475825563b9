"""Parameters that are whole on every rank that has them: no wrapper, or DDP."""

from __future__ import annotations

import logging

import torch

from distmon.layout.shard import Everything, Shard

log = logging.getLogger("distmon")


def plain_shard(name: str, parameter: torch.nn.Parameter) -> Shard:
    """The shard of an ordinary parameter."""
    told = False

    def grad() -> torch.Tensor | None:
        nonlocal told
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            if not told:
                told = True
                log.warning("the sparse gradient of %s is not read; its updates are", name)
            return None
        return gradient

    return Shard(
        name=name,
        global_shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        region=Everything(),
        weight=lambda: parameter,
        grad=grad,
        requires_grad=lambda: parameter.requires_grad,
        parameters=(parameter,),
    )
