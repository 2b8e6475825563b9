"""Which modules are blocks: the repeated modules of a model, or those that the user named.

Each rank lists its candidates. Blocks are chosen from the lists of all ranks, because a pipeline
stage may hold a single block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from distmon.collect.gradient_gain.block_table import Blocks
from distmon.errors import ConfigError
from distmon.layout import NamedModule, class_of
from distmon.layout.parameter_table import ModuleEntry

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_SMALL = 0.01
"""A chain with less than this share of the largest chain's parameters is not measured."""


def candidates(modules: Iterable[NamedModule], globs: Sequence[str]) -> list[ModuleEntry]:
    """Return the modules of this rank that may be blocks."""
    found = []
    for module in modules:
        if isinstance(module.called, torch.jit.ScriptModule):
            continue  # it takes no hooks
        if globs:
            if any(fnmatchcase(module.name, glob) for glob in globs):
                found.append(ModuleEntry(module.name, ""))
        elif _is_member(module) and not _is_layer(module.written):
            found.append(ModuleEntry(module.name, _kind(module.written)))
    return found


def choose(
    entries: Sequence[ModuleEntry], sizes: Mapping[str, int], globs: Sequence[str]
) -> Blocks:
    """Return the blocks among the candidates of all ranks, which may be none.

    `sizes` are the elements of each observed parameter. Raises ConfigError when a glob matches
    nothing.
    """
    for glob in globs:
        if not any(fnmatchcase(entry.name, glob) for entry in entries):
            raise ConfigError(
                f'no module matches "{glob}" of flow.blocks; modules have names such as those of '
                "their parameters, without the last part"
            )
    names = [entry.name for entry in entries] if globs else _repeated(entries, sizes)
    names = _outermost(names)
    chains = Counter(map(_chain, names))
    return Blocks(tuple(names), max(chains.values(), default=0))


def _repeated(entries: Sequence[ModuleEntry], sizes: Mapping[str, int]) -> list[str]:
    """Return members of a container that has their kind at least twice, without small chains."""
    held = _held_by({entry.name for entry in entries}, sizes)
    entries = [entry for entry in entries if held[entry.name]]
    kinds = Counter((_chain(entry.name), entry.kind) for entry in entries)
    names = [e.name for e in entries if kinds[_chain(e.name), e.kind] > 1]
    by_chain: Counter[str] = Counter()
    for name in names:
        by_chain[_chain(name)] += held[name]
    least = _SMALL * max(by_chain.values(), default=0)
    return [name for name in names if by_chain[_chain(name)] >= least]


def _held_by(modules: set[str], sizes: Mapping[str, int]) -> Counter[str]:
    held: Counter[str] = Counter()
    for parameter, size in sizes.items():
        for above in _above(parameter):
            if above in modules:
                held[above] += size
    return held


def _outermost(names: Sequence[str]) -> list[str]:
    """Return the names without those inside of another."""
    chosen = set(names)
    return [name for name in names if chosen.isdisjoint(_above(name))]


def _above(name: str) -> Iterable[str]:
    """Return `a` and `a.b` for `a.b.c`."""
    return (name[:i] for i, letter in enumerate(name) if letter == ".")


def _chain(name: str) -> str:
    return name.rpartition(".")[0]


def _is_member(module: NamedModule) -> bool:
    """Return whether it is in a container, or numbered: some models number their children."""
    return isinstance(module.holder, _CONTAINERS) or module.name.rpartition(".")[2].isdigit()


def _is_layer(module: nn.Module) -> bool:
    """Return whether it is a layer of torch, such as Linear: [Linear, ReLU, Linear] is no chain."""
    return class_of(module).__module__.startswith("torch.nn.") and not any(module.children())


def _kind(module: nn.Module) -> str:
    """Return a text that is equal for modules that repeat each other."""
    own = class_of(module)
    kind = f"{own.__module__}.{own.__qualname__}"
    if isinstance(module, _CONTAINERS):
        return f"{kind}({', '.join(_kind(child) for child in module.children())})"
    return kind
