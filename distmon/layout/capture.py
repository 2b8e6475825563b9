"""List the shards that this rank holds of a model, once, before the first forward."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Final

import torch
from torch import nn

from distmon.errors import LayoutError, UnreadableParameterError
from distmon.layout.flat_parameter import FlattenedParameter, flat_shard, flattened_parameters
from distmon.layout.names import clean_name
from distmon.layout.shard import Shard

log = logging.getLogger("distmon")
SHARD_MODULES: Final = (
    "plain",
    "dtensor",
    "wrapped",
)
"""Modules of this folder that have `shard_of(name, parameter, gradient_is_reduced)`, which returns
None for a parameter of another kind. Called in this order until one returns a shard."""
_REPLICATING_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def capture(
    model: nn.Module | Sequence[nn.Module],
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    rename: Callable[[str], str] = str,
    shard_of: Callable[[str, nn.Parameter], Shard] | None = None,
) -> list[Shard]:
    """Return the shards of all parameters in layer order, tied parameters once.

    Parameters of integers, and of tensor subclasses that hold no readable elements, are not read,
    and named in the log.

    Call it before the first forward: some wrappers swap their parameters while they run. Pass
    several modules for the pipeline stages of one rank. `rename` maps a name on this rank to the
    parameter's name in the whole model. `shard_of` makes the shard from a clean name and a
    parameter, for wrappers such as DeepSpeed's that keep the trained values elsewhere.

    Raises LayoutError when nothing can be observed, or when two parameters share a name.
    """
    modules = [model] if isinstance(model, nn.Module) else model
    if not isinstance(modules, list | tuple) or not all(isinstance(m, nn.Module) for m in modules):
        raise LayoutError(f"attach needs a torch.nn.Module, not a {type(model).__name__}")
    shards: dict[str, Shard] = {}
    not_read: list[str] = []
    found = 0
    for module in modules:
        for path, make in _walk(unwrap(module), shard_of):
            found += 1
            name = rename(clean_name(path))
            if not _is_selected(name, include, exclude):
                continue
            if name in shards:
                raise LayoutError(
                    f"two parameters of this rank have the name {name}: pass `rename` to map them "
                    "to their names in the whole model"
                )
            try:
                shard = make(name)
            except UnreadableParameterError as error:
                not_read.append(f"{name} ({error})")
                continue
            if shard.dtype.is_floating_point:
                shards[name] = shard
            else:
                not_read.append(f"{name} ({str(shard.dtype).removeprefix('torch.')})")
    if not_read:
        more = f" and {len(not_read) - 5} more" if len(not_read) > 5 else ""
        log.warning("distmon: not monitored: %s%s", ", ".join(not_read[:5]), more)
    kind = type(modules[0]).__name__ if modules else "no module"
    if not found:
        raise LayoutError(f"the model {kind} has no parameters to observe")
    if not shards:
        raise LayoutError(
            f"the patterns include {list(include)} and exclude {list(exclude)} select none of the "
            f"model's {found} parameters"
        )
    return [*shards.values()]


def _walk(
    model: nn.Module, shard_of: Callable[[str, nn.Parameter], Shard] | None
) -> Iterator[tuple[str, Callable[[str], Shard]]]:
    """Yield each parameter's path in layer order, and a function from clean name to shard."""
    by_module: defaultdict[int, list[FlattenedParameter]] = defaultdict(list)
    by_parameter: dict[int, FlattenedParameter] = {}
    flat_parameters = set()
    for flattened in flattened_parameters(model):
        flat_parameters.add(id(flattened.flat))
        if flattened.original is None:
            by_module[id(flattened.module)].append(flattened)
        else:
            by_parameter[id(flattened.original)] = flattened
    reduced = _with_reduced_gradients(model)
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for flattened in by_module[id(module)]:
            yield _join(prefix, flattened.name), partial(flat_shard, flattened=flattened)
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in flat_parameters or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if shard_of is not None:
                yield _join(prefix, own), partial(_made_by, shard_of, parameter)
            elif id(parameter) in by_parameter:
                flattened = by_parameter[id(parameter)]
                yield _join(prefix, own), partial(flat_shard, flattened=flattened)
            else:
                is_reduced = id(parameter) in reduced
                make = partial(
                    _shard,
                    parameter=parameter,
                    gradient_is_reduced=is_reduced,
                    path=(model, _join(prefix, own)),
                )
                yield _join(prefix, own), make


def _made_by(
    shard_of: Callable[[str, nn.Parameter], Shard], parameter: nn.Parameter, name: str
) -> Shard:
    return shard_of(name, parameter)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _with_reduced_gradients(model: nn.Module) -> set[int]:
    """Return the ids of parameters whose gradients a wrapper reduces before the optimizer step."""
    if not torch.distributed.is_available():
        return set()
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.reshard()  # after a forward, the module may still hold the unsharded parameters
    return {id(parameter) for unit in units for parameter in unit.parameters()}


def _shard(
    name: str, parameter: nn.Parameter, gradient_is_reduced: bool, path: tuple[nn.Module, str]
) -> Shard:
    for module in SHARD_MODULES:
        if module == "dtensor" and not torch.distributed.is_available():
            continue
        shard_of = import_module(f"distmon.layout.{module}").shard_of
        shard: Shard | None = shard_of(name, parameter, gradient_is_reduced)
        if shard is not None:
            # What wraps other kinds of parameters may put them aside while it runs.
            plain = module == "plain" and not gradient_is_reduced
            return replace(shard, path=path) if plain else shard
    raise UnreadableParameterError(f"a {type(parameter.data).__name__}")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, DataParallel and torch.compile wrappers, in any order."""
    while True:
        if isinstance(model, _REPLICATING_WRAPPERS):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _is_selected(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in include) and not any(
        fnmatchcase(name, glob) for glob in exclude
    )
