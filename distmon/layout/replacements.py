"""Parameters that were replaced in their module after attach."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distmon.layout.host_copies import HostCopy, copied_to_host
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
        self._links: tuple[tuple[dict[str, Any], ...], tuple[str, ...], tuple[object, ...]]
        """Where modules and parameters are held, under which names, and what is expected there."""
        self._find_links(shards)

    def replaced(self, shards: Sequence[Shard]) -> list[Replacement]:
        """Return the parameters that were replaced since the last call."""
        held, at, expected = self._links
        if all(map(operator.is_, map(dict.get, held, at), expected)):
            return []
        found: list[Replacement] = []
        names = {id(p): shard.name for shard in shards if (p := shard.parameter) is not None}
        sharded: dict[int, torch.Tensor] | None = None
        followed = [*shards]
        for i, shard in enumerate(shards):
            model, before = _model_of(shard), shard.parameter
            if model is not None and before is not None:
                now = _parameter_at(model, shard.path)
                if _is_put_aside(shard, now):
                    sharded = _sharded_parameters(model) if sharded is None else sharded
                    now = sharded.get(id(now), before)
                if now is not before and not _is_lent(before, now):
                    found.append(_follow(i, shard, now, names.get(id(now))))
                    followed[i] = found[-1].shard
                    if followed[i].parameter is not None:
                        names[id(now)] = shard.name
        self._find_links(followed)
        return found

    def _find_links(self, shards: Sequence[Shard]) -> None:
        links: dict[tuple[int, str], tuple[dict[str, Any], str, object]] = {}
        for shard in shards:
            module = _model_of(shard)
            if module is None:
                continue
            *modules, name = shard.path.split(".")
            for child in modules:
                inner = module._modules[child]
                links[id(module), child] = (module._modules, child, inner)
                assert inner is not None
                module = inner
            links[id(module), name] = (module._parameters, name, shard.parameter)
        held, at, expected = zip(*links.values(), strict=True) if links else ((), (), ())
        self._links = held, at, expected


def describe_added(added: Sequence[torch.Tensor], shards: Sequence[Shard]) -> str:
    """Return a sentence about parameters that an optimizer got after attach: they have no row."""
    models = {id(model): model for shard in shards if (model := _model_of(shard)) is not None}
    names = {id(p): name for model in models.values() for name, p in model.named_parameters()}
    found = [names.get(id(p), f"a tensor of shape {tuple(p.shape)}") for p in added]
    listed = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    return (
        f"parameters were given to an optimizer after attach ({len(found)}: {listed}); "
        "they are not monitored, and totals leave them out: attach again to monitor them"
    )


def _like(old: Shard, now: Any) -> Shard:
    """Return the shard of a parameter that took the place of another of its kind."""
    if isinstance(old, HostCopy):
        return copied_to_host(_like(old.shard, now))
    if not hasattr(now, "_spec"):
        return plain_shard(old.name, now, old.model, old.path)
    from distmon.layout.dtensor import dtensor_shard

    return dtensor_shard(old.name, now, old.paths is not None, old.model, old.path)


def _model_of(shard: Shard) -> nn.Module | None:
    """Return the model that has the shard's parameter at its path."""
    return None if shard.model is None else shard.model()


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
    return now is not shard.parameter and not _is_placed_alike(now, shard.parameter)


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
    before = old.parameter
    assert before is not None
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
