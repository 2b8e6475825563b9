"""Parameters that are tensor subclasses around the weight, as torchao has them for fp8 training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distmon.layout.plain import PlainShard, plain_shard
from distmon.layout.shard import Context, Shard, description


def shard_of(name: str, parameter: Any, _: Context) -> Shard | None:
    """Return the shard of a subclass that holds one tensor of its own shape and of a wide dtype.

    A subclass that holds scaled or packed values only has no elements that could be read.
    """
    inner = inner_name(parameter)
    if inner is None:
        return None
    known = description(plain_shard(name, parameter))
    known |= {"dtype": getattr(parameter, inner).dtype, "paths": (inner, "grad")}
    return WrappedShard(inner=inner, **known)


@dataclass(slots=True, kw_only=True, eq=False)
class WrappedShard(PlainShard):
    """A subclass around the weight."""

    inner: str
    """Attribute that holds the weight."""

    def weight(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.parameter, self.inner)
        return tensor


def inner_name(parameter: Any) -> str | None:
    """Return the attribute with the weight itself; None when there is none, or more than one."""
    if not hasattr(parameter, "__tensor_flatten__"):
        return None
    names, _ = parameter.__tensor_flatten__()
    wide = [
        name
        for name in names
        if type(tensor := getattr(parameter, name)) in (torch.Tensor, nn.Parameter)
        and tensor.shape == parameter.shape
        and tensor.is_floating_point()
        and tensor.element_size() > 1
    ]
    return wide[0] if len(wide) == 1 else None
