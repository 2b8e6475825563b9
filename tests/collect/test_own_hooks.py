"""Hooks that are removed and put back at every observation."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from distmon import native
from distmon.collect.own_hooks import KeptHook, KeptHooks


def test_a_kept_hook_comes_back_in_its_place_and_with_its_keywords() -> None:
    layer, called = nn.Linear(2, 2), []

    def other(*_: Any) -> None:
        called.append("other")

    def own(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        called.append(f"own {[*kwargs]}")

    layer.register_forward_pre_hook(other)
    kept = KeptHook(
        layer.register_forward_pre_hook(own, prepend=True, with_kwargs=True), first=True
    )
    layer(input=torch.ones(2))
    kept.remove()
    layer(input=torch.ones(2))
    kept.put_back()
    layer(input=torch.ones(2))
    assert called == ["own ['input']", "other", "other", "own ['input']", "other"]
    kept.remove()
    kept.remove()
    assert not layer._forward_pre_hooks_with_kwargs


def test_hooks_of_a_tensor_are_kept_like_those_of_a_module() -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), []
    before = parameter.register_hook(lambda _: seen.append("before"))  # type: ignore[no-untyped-call]
    after = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: seen.append("after")
    )
    hooks = [KeptHook(before), KeptHook(after)]
    for hook in hooks:
        hook.remove()
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == []
    for hook in hooks:
        hook.put_back()
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == ["before", "after"]


def test_a_hook_does_not_keep_its_module_alive() -> None:
    layer = nn.Linear(2, 2)
    kept = KeptHook(layer.register_forward_hook(lambda *_: None))
    kept.remove()
    alive = weakref.ref(layer)
    del layer
    assert alive() is None
    kept.put_back()
    kept.remove()


@pytest.mark.parametrize("compiled", [False, True])
def test_kept_hooks_are_registered_once(compiled: bool) -> None:
    layers, called, registered = [nn.Linear(2, 2)], [], []
    module = native.load() if compiled else None
    if compiled and module is None:
        pytest.skip("no native module")

    def own(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        called.append(f"own {[*kwargs]}")

    def register() -> list[KeptHook]:
        registered.append(True)
        (layer,) = layers
        before = layer.register_forward_pre_hook(own, prepend=True, with_kwargs=True)
        after = layer.register_forward_hook(lambda *_: called.append("after"))
        return [KeptHook(before, first=True), KeptHook(after)]

    layers[0].register_forward_pre_hook(lambda *_: called.append("other"))
    hooks = KeptHooks(register, module)
    for _ in range(3):
        hooks.install()
        hooks.install()
        layers[0](input=torch.ones(2))
        hooks.remove()
        hooks.remove()
        layers[0](input=torch.ones(2))
    assert called == ["own ['input']", "other", "after", "other"] * 3
    assert registered == [True]
    hooks.install()
    layers[0]._forward_hooks.clear()  # by somebody else
    hooks.remove()
    assert not layers[0]._forward_pre_hooks_with_kwargs
    layers.clear()
    hooks.install()
    hooks.remove()
