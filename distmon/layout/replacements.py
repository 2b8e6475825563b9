"""Parameters that were replaced in their module after attach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from distmon.layout.host_copies import copied_to_host
from distmon.layout.plain import plain_shard
from distmon.layout.shard import REDUCED_PATHS, Shard, absent_shard


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
        found: list[Replacement] = []
        names = {id(p): shard.name for shard in shards for p in shard.parameters[:1]}
        sharded: dict[int, torch.Tensor] | None = None
        followed = [*shards]
        for i, shard in enumerate(shards):
            model = None if shard.path is None else shard.path[0]()
            if shard.path is not None and model is not None:
                now = _parameter_at(model, shard.path[1])
                if _is_put_aside(shard, now):
                    sharded = _sharded_parameters(model) if sharded is None else sharded
                    now = sharded.get(id(now), shard.parameters[0])
                if now is not shard.parameters[0] and not _is_lent(shard.parameters[0], now):
                    found.append(_follow(i, shard, now, names.get(id(now))))
                    followed[i] = found[-1].shard
                    if followed[i].parameters:
                        names[id(now)] = shard.name
        self._find_links(followed)
        return found

    def _find_links(self, shards: Sequence[Shard]) -> None:
        links: dict[tuple[int, str], tuple[dict[str, Any], str, object]] = {}
        for shard in shards:
            if shard.path is None:
                continue
            model, path = shard.path
            module = model()
            if module is None:
                continue
            *modules, name = path.split(".")
            for child in modules:
                inner = module._modules[child]
                links[id(module), child] = (module._modules, child, inner)
                assert inner is not None
                module = inner
            links[id(module), name] = (module._parameters, name, shard.parameters[0])
        self._links = [*links.values()]


def describe_added(added: Sequence[torch.Tensor], shards: Sequence[Shard]) -> str:
    """Return a sentence about parameters that an optimizer got after attach: they have no row."""
    models = {id(model): model for shard in shards if shard.path and (model := shard.path[0]())}
    names = {id(p): name for model in models.values() for name, p in model.named_parameters()}
    found = [names.get(id(p), f"a tensor of shape {tuple(p.shape)}") for p in added]
    listed = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    return (
        f"parameters were given to an optimizer after attach ({len(found)}: {listed}); "
        "they are not monitored, and totals leave them out: attach again to monitor them"
    )


def _like(old: Shard, now: Any) -> Shard:
    """Return the shard of a parameter that took the place of another of its kind."""
    if old.copied:
        return copied_to_host(_like(replace(old, copied=False), now))
    if not hasattr(now, "_spec"):
        return plain_shard(old.name, now, old.path)
    from distmon.layout.dtensor import dtensor_shard

    shard = dtensor_shard(old.name, now, old.paths is not None)
    return replace(shard, path=old.path)


def _parameter_at(model: nn.Module, path: str) -> torch.Tensor | None:
    """Return the parameter at a path; None where there is none any more."""
    try:
        return model.get_parameter(path)
    except AttributeError:
        return None


def _is_lent(before: torch.Tensor, now: torch.Tensor | None) -> bool:
    """Return whether a parameter that is not in its module is still the one that is trained.

    `torch.func.functional_call` puts others in place of those of the module, for one call, and they
    get the gradients.
    """
    if now is None or not now.requires_grad:
        return False
    return now.grad is None and before.grad is not None


def _is_put_aside(shard: Shard, now: torch.Tensor | None) -> bool:
    """Return whether a wrapper that shards has swapped its parameter for the moment.

    `fully_shard` puts the unsharded parameter into the module, which is no DTensor, or one on fewer
    mesh dimensions. What has the placements of the parameter itself has replaced it.
    """
    if shard.paths is None or shard.paths[1] != REDUCED_PATHS[1] or now is None:
        return False
    return now is not shard.parameters[0] and not _is_placed_alike(now, shard.parameters[0])


def _sharded_parameters(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return what `fully_shard` has put aside, by the id of what is in the module instead."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        for group in getattr(state and state(), "_fsdp_param_groups", ()):
            for each in group.fsdp_params:
                if hasattr(each, "_unsharded_param"):
                    found[id(each._unsharded_param)] = each.sharded_param
    return found


def _is_placed_alike(now: object, before: object) -> bool:
    """Return whether two parameters are both plain tensors, or are sharded in the same way."""
    spec, old = getattr(now, "_spec", None), getattr(before, "_spec", None)
    if spec is None or old is None:
        return spec is old
    return bool(spec.mesh == old.mesh and spec.placements == old.placements)


def _follow(
    index: int, old: Shard, now: torch.Tensor | None, other_name: str | None
) -> Replacement:
    """Return what became of a parameter; `other_name` has the one in its place if it is read."""
    before = old.parameters[0]
    advice = "is no longer monitored: attach again to monitor it"
    if now is None:
        change = "was removed from its module"
    elif other_name is not None:
        change = f"was replaced by {other_name}"
        advice = "is monitored under that name: its gradient counts once"
    elif not _is_placed_alike(now, before) or now.device != before.device:
        change = f"was replaced by a {type(now.data).__name__} on {now.device}"
    elif now.shape != before.shape:
        change = f"changed its shape from {tuple(before.shape)} to {tuple(now.shape)}"
    elif now.dtype != before.dtype:
        change = f"changed its dtype from {before.dtype} to {now.dtype}"
    else:
        shard = _like(old, now)
        return Replacement(index, shard, f"{old.name} was replaced; the new parameter is read")
    absent = absent_shard(
        old.name,
        old.global_shape,
        old.dtype,
        torch.device("cpu") if old.copied else before.device,
        requires_grad=old.requires_grad(),
        may_be_partial=old.may_be_partial,
    )
    return Replacement(index, absent, f"{old.name} {change} and {advice}")
