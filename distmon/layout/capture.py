"""Look at a model once, before its first forward, and list what this rank holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from distmon.errors import LayoutError
from distmon.layout.flat import FlatPiece, flat_pieces, flat_shard
from distmon.layout.names import clean_name
from distmon.layout.plain import plain_shard
from distmon.layout.shard import Shard

_WHOLE_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def capture(
    model: nn.Module | Sequence[nn.Module],
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    rename: Callable[[str], str] = str,
    shard_of: Callable[[str, nn.Parameter], Shard] | None = None,
) -> list[Shard]:
    """The shards of all real-valued parameters in layer order, tied ones once.

    Call it before the first forward: some wrappers swap their parameters while they run. Several
    modules are the pipeline stages of one rank. `rename` turns a name found here into the one that
    the parameter has in the whole model. `shard_of` makes the shard of a clean name and a parameter
    that is not what it looks like.
    """
    modules = [model] if isinstance(model, nn.Module) else model
    if not isinstance(modules, list | tuple) or not all(isinstance(m, nn.Module) for m in modules):
        raise LayoutError(f"attach needs a torch.nn.Module, not a {type(model).__name__}")
    shards: dict[str, Shard] = {}
    found = 0
    for module in modules:
        for path, make in _walk(unwrap(module), shard_of):
            found += 1
            name = rename(clean_name(path))
            if not _wanted(name, include, exclude):
                continue
            if name in shards:
                raise LayoutError(
                    f"two parameters of this rank are called {name}: name them as in the whole "
                    "model with `rename`"
                )
            shard = make(name)
            if shard.dtype.is_floating_point:
                shards[name] = shard
    kind = type(modules[0]).__name__ if modules else "no module"
    if not found:
        raise LayoutError(f"the model {kind} has no parameters to observe")
    if not shards:
        raise LayoutError(
            f"none of the model's {found} parameters is observed: check include "
            f"{list(include)} and exclude {list(exclude)}"
        )
    return [*shards.values()]


def _walk(
    model: nn.Module, shard_of: Callable[[str, nn.Parameter], Shard] | None
) -> Iterator[tuple[str, Callable[[str], Shard]]]:
    """Path of every parameter in layer order, and what makes its shard from its clean name."""
    by_module: defaultdict[int, list[FlatPiece]] = defaultdict(list)
    by_parameter: dict[int, FlatPiece] = {}
    vectors = set()
    for piece in flat_pieces(model):
        vectors.add(id(piece.flat))
        if piece.original is None:
            by_module[id(piece.module)].append(piece)
        else:
            by_parameter[id(piece.original)] = piece
    reduced = _with_reduced_gradients(model)
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for flat_piece in by_module[id(module)]:
            yield _join(prefix, flat_piece.name), partial(flat_shard, piece=flat_piece)
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in vectors or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if shard_of is not None:
                yield _join(prefix, own), partial(_made_by, shard_of, parameter)
            elif id(parameter) in by_parameter:
                piece = by_parameter[id(parameter)]
                yield _join(prefix, own), partial(flat_shard, piece=piece)
            else:
                managed = id(parameter) in reduced
                make = partial(_shard, parameter=parameter, gradient_is_reduced=managed)
                yield _join(prefix, own), make


def _made_by(
    shard_of: Callable[[str, nn.Parameter], Shard], parameter: nn.Parameter, name: str
) -> Shard:
    return shard_of(name, parameter)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _with_reduced_gradients(model: nn.Module) -> set[int]:
    """Parameters whose wrapper adds up their gradients over ranks before the optimizer."""
    if not torch.distributed.is_available():
        return set()
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.reshard()  # after a forward, gathered parameters may stand in for the sharded ones
    return {id(parameter) for unit in units for parameter in unit.parameters()}


def _shard(name: str, parameter: nn.Parameter, gradient_is_reduced: bool) -> Shard:
    if type(parameter.data) is torch.Tensor:
        if hasattr(parameter, "ds_numel"):
            raise LayoutError(
                f"parameter {name} is partitioned by DeepSpeed: attach to the engine instead"
            )
        return plain_shard(name, parameter)
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(parameter.data, DTensor):
            from distmon.layout.dtensor import dtensor_shard

            return dtensor_shard(name, parameter, gradient_is_reduced)  # type: ignore[arg-type]
    raise LayoutError(
        f"parameter {name} is a {type(parameter.data).__name__}, which cannot be read element by "
        "element"
    )


def unwrap(model: nn.Module) -> nn.Module:
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
