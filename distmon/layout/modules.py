"""The modules of a model under clean names, without the name parts that wrappers insert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distmon.layout.capture import unwrap
from distmon.layout.names import clean_name


@dataclass(frozen=True)
class NamedModule:
    """One module of the user's model, with or without wrappers."""

    name: str
    """Name in the whole model."""
    called: nn.Module
    """The outermost wrapper, which the forward pass calls, or the module itself."""
    written: nn.Module
    """The user's module, inside all wrappers."""
    holder: nn.Module | None
    """The parent module, without wrappers."""


def named_modules(
    model: nn.Module | Sequence[nn.Module], rename: Callable[[str], str] = str
) -> list[NamedModule]:
    """Return all modules in layer order, without the model itself, shared modules once.

    `rename` maps the name of a parameter to its name in the whole model, as in `capture`; the name
    of a module is derived from one of its parameters.
    """
    found: dict[str, NamedModule] = {}
    for each in [model] if isinstance(model, nn.Module) else model:
        wrappers: dict[str, list[nn.Module]] = {}
        for path, module in unwrap(each).named_modules():
            wrappers.setdefault(clean_name(path), []).append(module)
        for name, (called, *inner) in wrappers.items():
            if name:
                written = inner[-1] if inner else called
                holders = wrappers.get(name.rpartition(".")[0])
                holder = holders[-1] if holders else None
                name = _renamed(name, written, rename)
                found.setdefault(name, NamedModule(name, called, written, holder))
    return [*found.values()]


def written_module(model: nn.Module) -> nn.Module:
    """Return the user's module inside all wrappers."""
    engine = any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__)
    held = getattr(model, "module", None) if engine else None
    found = inner = unwrap(held if isinstance(held, nn.Module) else model)
    for path, module in inner.named_modules():
        if clean_name(path):
            break
        found = module
    return found


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the user's class of a module; `fully_shard` puts a generated class before it."""
    return next(
        each for each in type(module).__mro__ if not each.__module__.startswith("torch.distributed")
    )


def _renamed(name: str, module: nn.Module, rename: Callable[[str], str]) -> str:
    for own, _ in module.named_parameters():
        suffix = f".{clean_name(own)}"
        whole = rename(name + suffix)
        if whole.endswith(suffix):
            return whole.removesuffix(suffix)
    return rename(name)


def parameters_reduced_during_backward(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients are reduced while the backward pass runs, with one wait
    for all of them at its end.

    That is so under DistributedDataParallel. Where parameters are sharded too, ranks also wait in
    between, and the two cannot be separated.
    """
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    return [*inner.parameters()] if isinstance(inner, DistributedDataParallel) else []
