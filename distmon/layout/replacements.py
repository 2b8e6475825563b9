"""Parameters that were replaced in their module after attach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from distmon.layout.plain import plain_shard
from distmon.layout.shard import Shard, absent_shard


@dataclass(frozen=True)
class Replacement:
    """What became of one parameter."""

    index: int
    shard: Shard
    """Reads the parameter that took its place; an absent shard where there is none like it."""
    sentence: str


class ParameterIdentities:
    """Finds out at every observation whether the model still holds the parameters that are read.

    A look-up by name per module and parameter.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._links: list[tuple[dict[str, Any], str, object]] = []
        """Where a module or parameter is held, under which name, and what is expected there."""
        self._find_links(shards)

    def replaced(self, shards: Sequence[Shard]) -> list[Replacement]:
        """Return the parameters that were replaced since the last call."""
        if all(held.get(name) is expected for held, name, expected in self._links):
            return []
        found = []
        followed = [*shards]
        for i, shard in enumerate(shards):
            if shard.path is not None:
                now = _parameter_at(*shard.path)
                if now is not shard.parameters[0]:
                    found.append(_follow(i, shard, now))
                    followed[i] = found[-1].shard
        self._find_links(followed)
        return found

    def _find_links(self, shards: Sequence[Shard]) -> None:
        links: dict[tuple[int, str], tuple[dict[str, Any], str, object]] = {}
        for shard in shards:
            if shard.path is None:
                continue
            module, path = shard.path
            *modules, name = path.split(".")
            for child in modules:
                inner = module._modules[child]
                links[id(module), child] = (module._modules, child, inner)
                assert inner is not None
                module = inner
            links[id(module), name] = (module._parameters, name, shard.parameters[0])
        self._links = [*links.values()]


def _parameter_at(model: nn.Module, path: str) -> torch.Tensor | None:
    """Return the parameter at a path; None where there is none any more."""
    try:
        return model.get_parameter(path)
    except AttributeError:
        return None


def _follow(index: int, old: Shard, now: torch.Tensor | None) -> Replacement:
    before = old.parameters[0]
    if now is None:
        change = "was removed from its module"
    elif type(now.data) is not torch.Tensor or now.device != before.device:
        change = f"was replaced by a {type(now.data).__name__} on {now.device}"
    elif now.shape != before.shape:
        change = f"changed its shape from {tuple(before.shape)} to {tuple(now.shape)}"
    elif now.dtype != before.dtype:
        change = f"changed its dtype from {before.dtype} to {now.dtype}"
    else:
        shard = replace(plain_shard(old.name, now), path=old.path)
        return Replacement(index, shard, f"{old.name} was replaced; the new parameter is read")
    absent = absent_shard(
        old.name,
        old.global_shape,
        old.dtype,
        before.device,
        requires_grad=old.requires_grad(),
        may_be_partial=old.may_be_partial,
    )
    return Replacement(
        index, absent, f"{old.name} {change} and is no longer monitored: attach again to monitor it"
    )
