"""Which modules are watched: found by their kind, by what their code calls, or by globs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from distmon.collect.inside.catalog import Catalog
from distmon.collect.inside.code_names import LOOP, called_names
from distmon.config import InsideConfig
from distmon.errors import ConfigError
from distmon.layout import NamedModule, class_of
from distmon.layout.parameter_table import ModuleEntry

MOST_ROWS: Final = 256
"""Activations that are watched; of more, those evenly spaced in layer order."""
MOST_MATRICES: Final = 256
WATCHED: Final = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.Hardtanh, nn.Sigmoid, nn.Hardsigmoid, nn.Tanh)
"""Activation functions whose units can be dead, or that are bounded."""
FUNCTIONS: Final = ("relu", "relu6", "sigmoid", "tanh")
"""The same as functions, by name; `relu_` counts as `relu`."""
_MOST_CALLS: Final = 8
"""Calls of one function that have a row, in a module that calls it in a loop."""
_NEVER_CALLED: Final = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_ATTENTION: Final = re.compile(r"attention|attn", re.IGNORECASE)
_ROUTER: Final = re.compile(r"(^|_)(gate|router|gating|wg|switch)$", re.IGNORECASE)


def candidates(
    modules: Sequence[NamedModule], roots: Mapping[str, nn.Module], config: InsideConfig
) -> list[ModuleEntry]:
    """Return what this rank may watch; `kind` is the kind of statistics, for a router its experts.

    `roots` are the models themselves, by the name that they get in records.
    """
    called = [each for each in modules if not isinstance(each.called, torch.jit.ScriptModule)]
    found: list[ModuleEntry] = []
    if "activations" in config.kinds:
        found += _activations(called, roots, config.modules)
    if "attention" in config.kinds:
        named = [(each.name, each.written) for each in called]
        found += [
            ModuleEntry(name, "attention")
            for name, module in (*roots.items(), *named)
            if _attends(module)
        ]
    if "experts" in config.kinds:
        found += _routers(called, config.routers)
    return found


def choose(
    lists: Sequence[Sequence[ModuleEntry]],
    blocks: Sequence[str],
    parameters: Mapping[str, tuple[int, ...]],
    config: InsideConfig,
) -> Catalog:
    """Return what is watched, from the candidates of all ranks.

    `parameters` are the shapes of all parameters. Raises ConfigError when a glob matches nothing.
    """
    merged = dict.fromkeys(entry for entries in lists for entry in entries)
    by_kind: dict[str, list[ModuleEntry]] = {}
    for entry in merged:
        by_kind.setdefault(entry.kind.partition(":")[0], []).append(entry)
    activations = [entry.name for entry in by_kind.get("activations", ())]
    _check_globs("inside.modules", config.modules, activations)
    if "activations" in config.kinds:
        activations = _in_layer_order(blocks, activations)
    routers = [(e.name, int(e.kind.partition(":")[2])) for e in by_kind.get("experts", ())]
    _check_globs("inside.routers", config.routers, [name for name, _ in routers])
    return Catalog(
        activations=_some(activations, MOST_ROWS),
        attention=_some([e.name for e in by_kind.get("attention", ())], MOST_ROWS),
        experts=_some(routers, MOST_ROWS),
        matrices=_matrices(blocks, parameters, config),
    )


def call_names(name: str, module: nn.Module) -> dict[str, list[str]]:
    """Return, by function of FUNCTIONS that a module's own code calls, the rows of its calls."""
    if _is_of_torch(module):
        return {}
    counts = called_names(class_of(module))  # type: ignore[arg-type]
    children = dict(module.named_children())
    found = {}
    for function in FUNCTIONS:
        calls = counts[function] + counts[f"{function}_"]
        if not calls or function in children:
            continue
        calls = _MOST_CALLS if counts[LOOP] else min(calls, _MOST_CALLS)
        found[function] = [f"{name}:{function}{f'.{i}' if i else ''}" for i in range(calls)]
    return found


def _activations(
    modules: Sequence[NamedModule], roots: Mapping[str, nn.Module], globs: Sequence[str]
) -> list[ModuleEntry]:
    names: list[str] = []
    for name, root in roots.items():
        names += [row for rows in call_names(name, root).values() for row in rows]
    tops = {id(root) for root in roots.values()}
    for module in modules:
        top = id(module.holder) in tops and any(True for _ in module.written.parameters())
        if (
            isinstance(module.written, WATCHED)
            or (top and not isinstance(module.written, _NEVER_CALLED))
            or any(fnmatchcase(module.name, glob) for glob in globs)
        ):
            names.append(module.name)
        rows = call_names(module.name, module.written)
        names += [row for function in rows.values() for row in function]
    return [ModuleEntry(name, "activations") for name in dict.fromkeys(names)]


def _attends(module: nn.Module) -> bool:
    """Return whether the module itself may compute attention."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if _is_of_torch(module):
        return False
    names = called_names(class_of(module))  # type: ignore[arg-type]
    if names["scaled_dot_product_attention"] or _ATTENTION.search(class_of(module).__name__):
        return True
    return bool(names["softmax"]) and not names["topk"] and not names["cross_entropy"]


def _routers(modules: Sequence[NamedModule], globs: Sequence[str]) -> list[ModuleEntry]:
    found = []
    for module in modules:
        last = module.name.rpartition(".")[2]
        if globs:
            wanted = any(fnmatchcase(module.name, glob) for glob in globs)
        else:
            siblings = {} if module.holder is None else dict(module.holder.named_children())
            beside = any("expert" in name.lower() for name in siblings if name != last)
            wanted = beside and bool(_ROUTER.search(last)) and "expert" not in last.lower()
        experts = _experts_of(module) if wanted else 0
        if experts > 1:
            found.append(ModuleEntry(module.name, f"experts:{experts}"))
    return found


def _experts_of(module: NamedModule) -> int:
    """Return how many experts a router chooses from; 0 when it does not say."""
    for each in (module.written, module.holder):
        for name in ("num_experts", "n_routed_experts", "n_experts"):
            value = getattr(each, name, None)
            if isinstance(value, int):
                return value
    for inner in module.written.modules():
        if isinstance(inner, nn.Linear):
            return inner.out_features
    for parameter in module.written.parameters():
        shape: Any = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) == 2:
            return int(shape[0])
    return 0


def _matrices(
    blocks: Sequence[str], parameters: Mapping[str, tuple[int, ...]], config: InsideConfig
) -> tuple[str, ...]:
    """Return the matrices of the blocks, or of the whole model without blocks, or by globs."""
    if "spectra" not in config.kinds:
        return ()
    names = [name for name, shape in parameters.items() if len(shape) >= 2 and min(shape) > 0]
    if config.matrices:
        _check_globs("inside.matrices", config.matrices, names)
        names = [n for n in names if any(fnmatchcase(n, glob) for glob in config.matrices)]
    elif blocks:
        inside = tuple(f"{block}." for block in blocks)
        names = [name for name in names if name.startswith(inside)] or names
    return _some(names, MOST_MATRICES)


def _in_layer_order(blocks: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the blocks among the other names: each after what is inside of it."""
    found = list(names)
    after = 0
    for block in blocks:
        inside = [i for i, name in enumerate(found) if name.startswith((f"{block}.", f"{block}:"))]
        after = inside[-1] + 1 if inside else after
        if block not in found:
            found.insert(after, block)
            after += 1
    return found


def _check_globs(key: str, globs: Sequence[str], names: Iterable[str]) -> None:
    names = [*names]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ConfigError(f'"{glob}" in {key} matches nothing that can be watched')


def _some(names: Sequence[Any], most: int) -> tuple[Any, ...]:
    if len(names) <= most:
        return tuple(names)
    return tuple(names[i * len(names) // most] for i in range(most))


def _is_of_torch(module: nn.Module) -> bool:
    return class_of(module).__module__.startswith("torch.nn.")
