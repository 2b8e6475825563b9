"""The modules of a model under clean names, without what wrappers put in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from distmon.layout.capture import unwrap
from distmon.layout.names import clean_name


@dataclass(frozen=True)
class NamedModule:
    """One module as the user sees it, however many wrappers it has."""

    name: str
    """In the whole model."""
    called: nn.Module
    """The outermost wrapper, or the module itself."""
    written: nn.Module
    """What the user wrote."""
    holder: nn.Module | None
    """The module that it is a child of, without wrappers."""


def named_modules(
    model: nn.Module | Sequence[nn.Module], rename: Callable[[str], str] = str
) -> list[NamedModule]:
    """All modules in layer order, the model itself left out, shared ones once.

    `rename` is that of `capture`: it turns the name of a parameter into the one in the whole model,
    and a module takes its name from a parameter of its own.
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


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote: some wrappers make a class of their own out of it."""
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
