"""What a rank knows of the model: by itself before the exchange, and of all ranks after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from distmon.collect.gradient_gain import Blocks, candidates, choose
from distmon.collect.inside.catalog import Catalog
from distmon.collect.inside.choosing import candidates as inside_candidates
from distmon.collect.inside.choosing import choose as choose_inside
from distmon.collect.inside.inside import WatchedModel
from distmon.config import MonitorConfig
from distmon.layout import NamedModule, Shard, written_module
from distmon.layout.checks import check_devices
from distmon.layout.parameter_table import RankContents, complete, describe, merge, merge_modules
from distmon.reduce.process_group import Ranks
from distmon.rules import BUILTIN, configure, with_users_rules
from distmon.rules.alert_patterns import check_patterns
from distmon.rules.base import Rule
from distmon.rules.engine import ActiveRule
from distmon.runtime.source import Source
from distmon.sampling.reading import Reading, choose_reading


@dataclass(frozen=True)
class Prepared:
    """What this rank has before the exchange."""

    shards: Sequence[Shard] = ()
    modules: Sequence[NamedModule] = ()
    roots: Mapping[str, nn.Module] = field(default_factory=dict)
    globs: tuple[str, ...] = ()
    rules: Sequence[ActiveRule] = ()
    contents: RankContents = field(default_factory=RankContents)


def prepare(source: Source, settings: MonitorConfig, own_rules: Sequence[Rule]) -> Prepared:
    """Return what this rank has, after checking the settings against it."""
    rules = with_users_rules(BUILTIN, settings.rules, own_rules)
    active = configure(rules, settings.rules)
    check_patterns(settings.actions, [rule.name for rule in rules])
    shards = source.find_shards(settings)
    check_devices(shards)
    modules: Sequence[NamedModule] = ()
    globs: tuple[str, ...] = ()
    flow, inside = settings.flow, settings.inside
    if source.find_modules is not None and (flow.enabled or inside.kinds):
        modules, globs = source.find_modules(), flow.blocks
    roots = _roots(source.models)
    contents = RankContents(
        describe(shards),
        candidates(modules, globs) if flow.enabled or inside.kinds else (),
        inside_candidates(modules, roots, inside) if inside.kinds else (),
    )
    return Prepared(shards, modules, roots, globs, active, contents)


def _roots(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the models themselves, without wrappers, by the name that they get in records."""
    names = ["(model)"] if len(models) == 1 else [f"(model {i})" for i in range(len(models))]
    return {name: written_module(model) for name, model in zip(names, models, strict=True)}


@dataclass(frozen=True)
class Blueprint:
    """What all ranks know of the model after the exchange, and this rank's part of it."""

    settings: MonitorConfig
    ranks: Ranks
    shards: list[Shard]
    """One for every parameter of the whole model, empty where this rank holds nothing."""
    rules: Sequence[ActiveRule]
    blocks: Blocks
    modules: Mapping[str, nn.Module]
    """This rank's modules by name, the blocks among them."""
    in_stages: bool
    """Ranks hold different modules."""
    hosts: tuple[str, ...]
    reading: Reading
    catalog: Catalog
    """What is watched inside the model."""
    watched: WatchedModel
    copies: int
    """Ranks that hold the same elements of a parameter, of the one that most ranks hold."""


def combine(
    prepared: Prepared,
    contents: Mapping[int, RankContents],
    hosts: tuple[str, ...],
    seconds: float,
    copies: int,
    settings: MonitorConfig,
    ranks: Ranks,
    device: torch.device,
) -> Blueprint:
    """Combine the contents of this rank with those of the others."""
    table = merge({rank: each.parameters for rank, each in contents.items()})
    sizes = {entry.name: math.prod(entry.shape) for entry in table}
    modules = merge_modules([each.modules for each in contents.values()])
    chain = choose(modules, sizes, prepared.globs)
    catalog = choose_inside(
        [each.inside for each in contents.values()],
        chain.names,
        {entry.name: entry.shape for entry in table},
        settings.inside,
    )
    return Blueprint(
        settings=settings,
        ranks=ranks,
        shards=complete(table, prepared.shards, device),
        rules=prepared.rules,
        blocks=chain if settings.flow.enabled else Blocks(),
        modules={each.name: each.called for each in prepared.modules},
        in_stages=len(contents) > 1,
        hosts=hosts,
        reading=choose_reading(settings.sample_size, settings.budget, settings.interval, seconds),
        catalog=catalog,
        watched=WatchedModel(prepared.modules, prepared.roots, in_stages=len(contents) > 1),
        copies=copies,
    )
