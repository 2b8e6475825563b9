"""Look at a model once, before its first forward, and list what this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from distmon.errors import LayoutError
from distmon.layout.names import clean_name
from distmon.layout.plain import plain_shard
from distmon.layout.shard import Shard

_WHOLE_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def capture(
    model: nn.Module, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()
) -> list[Shard]:
    """The shards of all real-valued parameters in layer order, tied ones once.

    Call it before the first forward: some wrappers swap their parameters while they run.
    """
    if not isinstance(model, nn.Module):
        raise LayoutError(f"attach needs a torch.nn.Module, not a {type(model).__name__}")
    shards: list[Shard] = []
    found = 0
    for name, parameter in _unwrap(model).named_parameters():
        found += 1
        clean = clean_name(name)
        if not parameter.is_floating_point() or not _wanted(clean, include, exclude):
            continue
        shards.append(_shard(clean, parameter))
    if not found:
        raise LayoutError(f"the model {type(model).__name__} has no parameters to observe")
    if not shards:
        raise LayoutError(
            f"none of the model's {found} parameters is observed: check include "
            f"{list(include)} and exclude {list(exclude)}"
        )
    return shards


def _shard(name: str, parameter: nn.Parameter) -> Shard:
    if type(parameter.data) is not torch.Tensor:
        raise LayoutError(
            f"parameter {name} is a {type(parameter.data).__name__}: this version observes "
            "unwrapped and DDP models"
        )
    if hasattr(parameter, "_fqns") or hasattr(parameter, "ds_numel"):
        raise LayoutError(
            f"parameter {name} is a piece of a flattened group: this version observes unwrapped "
            "and DDP models"
        )
    if parameter.is_meta:
        raise LayoutError(f"parameter {name} is on the meta device: attach after it has storage")
    return plain_shard(name, parameter)


def _unwrap(model: nn.Module) -> nn.Module:
    """Take off DDP and torch.compile in whatever order they were put on."""
    while True:
        if isinstance(model, _WHOLE_WRAPPERS):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _wanted(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in include) and not any(
        fnmatchcase(name, glob) for glob in exclude
    )
