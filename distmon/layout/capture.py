"""List the shards that this rank holds of a model, once, before the first forward."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from distmon.errors import LayoutError, UnreadableParameterError
from distmon.layout.flat_parameter import FlattenedParameter, flat_shard, flattened_parameters
from distmon.layout.names import clean_name
from distmon.layout.shard import Context, Shard
from distmon.untrusted.values import encodable

log = logging.getLogger("distmon")
SHARD_MODULES: Final = (
    "plain",
    "dtensor",
    "wrapped",
)
"""Modules of this folder that have `shard_of(name, parameter, context)`, which returns None for a
parameter of another kind. Called in this order until one returns a shard."""
Maker = Callable[[str, nn.Parameter, Context], Shard | None]
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
            name = encodable(rename(path))
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
    if not_read and shards:
        log.warning("distmon: not monitored: %s", _some(not_read))
    kind = type(modules[0]).__name__ if modules else "no module"
    if not found:
        raise LayoutError(f"the model {kind} has no parameters to observe")
    if not shards and not_read:
        raise LayoutError(f"none of the selected parameters can be read: {_some(not_read)}")
    if not shards:
        raise LayoutError(
            f"the patterns include {list(include)} and exclude {list(exclude)} select none of the "
            f"model's {found} parameters"
        )
    return [*shards.values()]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _walk(
    model: nn.Module, shard_of: Callable[[str, nn.Parameter], Shard] | None
) -> Iterator[tuple[str, Callable[[str], Shard]]]:
    """Yield each parameter's clean name in layer order, and a function from name to shard."""
    by_module: defaultdict[int, list[FlattenedParameter]] = defaultdict(list)
    by_parameter: dict[int, FlattenedParameter] = {}
    flat_parameters = set()
    # Without their names: these would be half of the memory that capturing takes.
    modules = [module for _, module in _modules(model)]
    for flattened in flattened_parameters(modules):
        flat_parameters.add(id(flattened.flat))
        if flattened.original is None:
            by_module[id(flattened.module)].append(flattened)
        else:
            by_parameter[id(flattened.original)] = flattened
    reduced = _with_reduced_gradients(modules)
    makers = _makers()
    known: dict[Hashable, Any] = {}
    seen: set[int] = set()
    root = weakref.ref(model)
    for prefix, module in _modules(model):
        name = clean_name(prefix)
        for flattened in by_module.get(id(module), ()):
            yield _join(name, flattened.name), partial(flat_shard, flattened=flattened)
        for own, parameter in module._parameters.items():
            if parameter is None or id(parameter) in flat_parameters or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            own_name = _join(name, own)
            if is_lazy(parameter):
                raise LayoutError(
                    f"{own_name} has no shape yet, as in a lazy module: call the model once before "
                    "attaching to it"
                )
            make: Callable[[str], Shard]
            if shard_of is not None:
                make = partial(_made_by, shard_of, parameter)
            elif id(parameter) in by_parameter:
                make = partial(flat_shard, flattened=by_parameter[id(parameter)])
            else:
                path = own_name if name == prefix else _join(prefix, own)
                context = Context(root, path, id(parameter) in reduced, known)
                make = partial(_shard, makers, parameter, context)
            yield own_name, make


def _made_by(
    shard_of: Callable[[str, nn.Parameter], Shard], parameter: nn.Parameter, name: str
) -> Shard:
    return shard_of(name, parameter)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what `named_modules` does, which takes 10 times as long in deep models."""
    seen: set[int] = set()
    left = [("", model)]
    while left:
        prefix, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield prefix, module
        children = [(_join(prefix, k), m) for k, m in module._modules.items() if m is not None]
        left += reversed(children)


def _with_reduced_gradients(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of parameters whose gradients a wrapper reduces before the optimizer step."""
    if not torch.distributed.is_available():
        return set()
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in modules if isinstance(module, FSDPModule)]
    for unit in units:
        unit.reshard()  # after a forward, the module may still hold the unsharded parameters
    return {id(parameter) for unit in units for parameter in unit.parameters()}


def _makers() -> list[Maker]:
    names = [m for m in SHARD_MODULES if m != "dtensor" or torch.distributed.is_available()]
    return [import_module(f"distmon.layout.{name}").shard_of for name in names]


def _shard(makers: Sequence[Maker], parameter: nn.Parameter, context: Context, name: str) -> Shard:
    for shard_of in makers:
        shard = shard_of(name, parameter, context)
        if shard is not None:
            return shard
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
    included = "*" in include or any(fnmatchcase(name, glob) for glob in include)
    return included and not any(fnmatchcase(name, glob) for glob in exclude)
