"""Which modules count as blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gain_models import Block, Net
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import distmon
from distmon.collect.gradient_gain import Blocks, candidates, choose
from distmon.errors import ConfigError
from distmon.layout import capture, named_modules
from distmon.layout.parameter_table import merge_modules


def _found(
    *stages: nn.Module, globs: tuple[str, ...] = (), rename: Callable[[str], str] = str
) -> Blocks:
    """What ranks that hold these stages agree on."""
    sizes = {s.name: s.numel for stage in stages for s in capture(stage, rename=rename)}
    lists = [candidates(named_modules(stage, rename), globs) for stage in stages]
    return choose(merge_modules(lists), sizes, globs)


class Holder(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def _blocks(count: int) -> list[Block]:
    return [Block() for _ in range(count)]


def _named(*numbers: int) -> nn.ModuleDict:
    return nn.ModuleDict({str(number): Block() for number in numbers})


def test_blocks_of_a_list() -> None:
    assert _found(Net(3)) == Blocks(("blocks.0", "blocks.1", "blocks.2"), 3)


def test_blocks_among_other_layers() -> None:
    layers = [("embed", nn.Linear(8, 12)), ("a", Block()), ("b", Block()), ("norm", nn.ReLU())]
    assert _found(nn.Sequential(OrderedDict(layers))).names == ("a", "b")


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        nn.Sequential(Block(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
        Block(),
        Net(1),
    ],
)
def test_nothing_is_repeated(model: nn.Module) -> None:
    assert _found(model) == Blocks()


def test_what_is_inside_of_a_block_is_none() -> None:
    def nested() -> nn.Module:
        return Holder(experts=nn.ModuleList(_blocks(4)))

    model = Holder(layers=nn.ModuleList([nested(), nested()]))
    assert _found(model) == Blocks(("layers.0", "layers.1"), 2)
    # A container of one is no chain; what it holds may be one.
    assert _found(nn.Sequential(nested())).names == tuple(f"0.experts.{i}" for i in range(4))


def test_two_kinds_in_turn_are_one_chain() -> None:
    other = [Holder(a=nn.Linear(12, 12)) for _ in range(2)]
    model = nn.ModuleList([Block(), other[0], Block(), other[1]])
    assert _found(model) == Blocks(("0", "1", "2", "3"), 4)


def test_containers_repeat_each_other_when_their_members_do() -> None:
    def layer(*extra: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), *extra)

    assert _found(nn.Sequential(layer(), layer(), layer(nn.ReLU()))).names == ("0", "1")


def test_encoder_and_decoder_count_and_small_heads_do_not() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    model = Holder(
        encoder=Holder(layers=nn.ModuleList(_blocks(3))),
        decoder=Holder(layers=nn.ModuleList(_blocks(2))),
        heads=nn.ModuleList([Head(), Head()]),
    )
    encoder = tuple(f"encoder.layers.{i}" for i in range(3))
    decoder = tuple(f"decoder.layers.{i}" for i in range(2))
    assert _found(model) == Blocks((*encoder, *decoder), 3)


def test_stages_of_a_pipeline_have_one_table() -> None:
    """One block on a stage, interleaved ones, and ones that count from 0 on each stage."""
    first, second = Holder(blocks=_named(0, 4)), Holder(blocks=_named(2))
    assert _found(first, second) == Blocks(("blocks.0", "blocks.2", "blocks.4"), 3)

    def rename(name: str) -> str:
        """As a user writes it, for parameters: with a dot behind the number."""
        return name.replace("blocks.0.", "blocks.7.")

    stage = Holder(blocks=nn.ModuleList(_blocks(1)))
    parts = ("", ".norm", ".up", ".down")
    names = [module.name for module in named_modules(stage, rename)]
    assert names == ["blocks", *(f"blocks.7{part}" for part in parts)]


def test_wrappers_do_not_hide_blocks() -> None:
    model = Net(2)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    assert _found(torch.compile(model, backend="eager")).names == ("blocks.0", "blocks.1")
    first = next(m for m in named_modules(model) if m.name == "blocks.0")
    # The wrapper is called once; what it wraps, once more in the backward pass.
    assert first.called is model.blocks[0]
    assert type(first.written) is Block


def test_globs_take_the_outermost_match() -> None:
    found = _found(Net(2), globs=("blocks.*", "head"))
    assert found == Blocks(("blocks.0", "blocks.1", "head"), 2)
    assert _found(Net(2), globs=("*.up",)).names == ("blocks.0.up", "blocks.1.up")


def test_a_glob_that_matches_nothing_is_named(tmp_path: Path) -> None:
    model = Net(2)
    with pytest.raises(ConfigError, match=r'^no module matches "layers\.\*" of flow\.blocks'):
        distmon.attach(
            model,
            torch.optim.SGD(model.parameters()),
            run_dir=tmp_path,
            flow={"blocks": ["blocks.*", "layers.*"]},
        )
    assert not model.blocks[0]._forward_hooks


def test_unobserved_parameters_make_no_block(tmp_path: Path) -> None:
    model = Net(2)
    optimizer = torch.optim.SGD(model.parameters())
    with distmon.attach(model, optimizer, run_dir=tmp_path, exclude=["blocks.*"]):
        assert not model.blocks[0]._forward_hooks
