"""Watch the inside of one model: which steps are measured, and what is sent."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from distmon.collect.gradient_gain.in_graph import never_compile_alone, something_was_compiled
from distmon.collect.inside.activation_rows import UNBOUNDED, bounds_of, reads_by_triton
from distmon.collect.inside.activations import ActivationHook, ActivationRow
from distmon.collect.inside.attention import AttentionRow, MostRead
from distmon.collect.inside.catalog import Catalog
from distmon.collect.inside.choosing import WATCHED, call_names
from distmon.collect.inside.experts import RouterHook
from distmon.collect.inside.functions import FunctionTaps, Tap
from distmon.collect.inside.tables import Tables, Watching
from distmon.collect.own_hooks import OwnHook
from distmon.device import to_device
from distmon.layout import NamedModule

log = logging.getLogger("distmon")


@dataclass(frozen=True)
class WatchedModel:
    """This rank's part of the model."""

    modules: Sequence[NamedModule] = ()
    roots: Mapping[str, nn.Module] = field(default_factory=dict)
    """The models themselves, by the name that they get in records."""
    in_stages: bool = False
    """Ranks hold different modules."""


class Inside:
    """Measures what the catalog lists. With an empty catalog it does nothing."""

    def __init__(
        self,
        catalog: Catalog,
        model: WatchedModel,
        device: torch.device,
        attention_sample: MostRead,
        log_level: int = logging.WARNING,
    ) -> None:
        """`log_level`: of what is said once for all ranks."""
        self.catalog = catalog
        self.watching = Watching()
        self.tables = Tables(catalog, device)
        self.spectra: torch.Tensor | None = None
        """What this rank knows of the matrices, sent with the next observation."""
        self._in_stages = model.in_stages
        self._attention_sample = attention_sample
        # Without anything to measure the model is not kept alive.
        self._roots = [*model.roots.values()] if catalog else []
        self._hooks: list[tuple[nn.Module, object]] = []
        """Modules, and the forward hook or tap that each gets."""
        self._taps = FunctionTaps(self.watching)
        self._handles: list[RemovableHandle] = []
        self._removable = device.type == "cpu"
        self._log_level, self._said = log_level, False
        if catalog:
            self._make_hooks(model)
        if catalog.activations:
            reads_by_triton(device)  # compile now, not in the first observed step

    def _make_hooks(self, model: WatchedModel) -> None:
        places = {name: row for row, name in enumerate(self.catalog.activations)}
        routers = {name: (experts, at) for name, experts, at in self.catalog.rows_of_experts()}
        attention = {name: row for row, name in enumerate(self.catalog.attention)}
        makers = _makers(model.modules)
        outputs = _last_leaves(model)
        named = [(each.name, each.called, each.written, each.holder) for each in model.modules]
        named += [(name, root, root, None) for name, root in model.roots.items()]
        for name, called, written, holder in named:
            if name in places:
                bounded = isinstance(written, WATCHED) and name not in outputs
                bounds = bounds_of(written) if bounded else UNBOUNDED
                row = self.tables.activation(places[name])
                made = ActivationRow(self.watching, row, bounds, makers.get(name, ()))
                self._hooks.append((called, ActivationHook(made)))
            if name in routers:
                hook = RouterHook(self.watching, self.tables.sums, routers[name], (written, holder))
                self._hooks.append((called, hook))
            tap = Tap()
            if name in attention:
                row = self.tables.attention(attention[name])
                of_torch = isinstance(written, nn.MultiheadAttention)
                tap.attention = AttentionRow(*row, self._attention_sample, of_torch)
            calls = call_names(name, written)
            # A cell with gates, as that of an LSTM: an open or closed gate is at its bounds.
            gated = len(calls.get("sigmoid", ())) > 1 and "tanh" in calls
            for function, rows in calls.items():
                tap.functions[function] = [
                    ActivationRow(
                        self.watching,
                        self.tables.activation(places[row]),
                        UNBOUNDED if gated else bounds_of(function),
                        makers.get(name, ()),
                    )
                    for row in rows
                    if row in places
                ]
            if tap:
                self._hooks.append((called, tap))

    def install(self) -> None:
        """Register the hooks, before the model is called. Safe to call twice."""
        if self._handles:
            return
        for root in self._roots if self._hooks else ():
            self._handles.append(root.register_forward_pre_hook(_Forward(self.watching, True)))
            end = _Forward(self.watching, False)
            self._handles.append(root.register_forward_hook(end, always_call=True))
        for module, hook in self._hooks:
            if isinstance(hook, Tap):
                handles = self._taps.put_on(module, hook)
            else:
                handles = iter([module.register_forward_hook(hook)])  # type: ignore[arg-type]
            for handle in handles:
                self._handles.append(handle)  # one by one: the next one may raise

    def remove(self) -> None:
        """Measure nothing more, and remove the hooks. Safe to call twice."""
        self.watching.armed = False
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def at_rest(self) -> bool:
        """Whether no step is measured, nothing has failed, and no hook is to be removed."""
        on = bool(self._handles) and self._removable
        return not on and not self.watching.armed and self.watching.fault is None

    def arm(self, wanted: bool, first: bool) -> None:
        """Clear the rows before a step that is `wanted`, and measure in it.

        As for the gradient gain, `first`: no step has completed yet. Pipelines of torch make a
        trial run before their first step.
        """
        wanted = wanted and bool(self._hooks) and not (first and self._in_stages)
        self.watching.armed = wanted
        self.watching.in_training_forward = False
        if wanted:
            self._say_what_is_compiled()
            self.tables.clear()
            self._taps.restart()
            self.install()
        elif not first and self._removable and not something_was_compiled():
            self._remove_hooks()

    def _say_what_is_compiled(self) -> None:
        if self._said or not something_was_compiled():
            return
        self._said = True
        if any(isinstance(hook, Tap) for _, hook in self._hooks):
            kinds = "attention and " if self.catalog.attention else ""
            reason = "are not measured, as this process has compiled code"
            log.log(self._log_level, "distmon: %sfunctions such as F.relu %s", kinds, reason)

    def take_fault(self) -> Exception | None:
        """Return what failed in a hook since the last call."""
        fault, self.watching.fault = self.watching.fault, None
        return fault

    def send(self, sums: torch.Tensor, maxima: torch.Tensor) -> None:
        """Fill this rank's part of the two buffers; nothing when this step was not measured."""
        if not len(sums):  # nothing is listed
            return
        if self.watching.armed:
            sums.copy_(self.tables.sums, non_blocking=True)
            maxima.copy_(self.tables.maxima, non_blocking=True)
        else:
            sums.zero_()
            maxima.fill_(-torch.inf)
        at = self.catalog.rows_of_matrices.sums
        known, self.spectra = self.spectra, None
        if known is not None and len(sums) > at:
            sums[at:].copy_(to_device(known, sums.device).flatten())
        elif len(sums) > at:
            sums[at:] = 0


class _Forward(OwnHook):
    """Notes the begin and the end of a forward of the whole model."""

    def __init__(self, watching: Watching, begins: bool) -> None:
        self._watching, self._begins = watching, begins
        never_compile_alone(_Forward.__call__)

    def __call__(self, *_: object) -> None:
        if not is_compiling():
            self._watching.in_training_forward = self._begins and torch.is_grad_enabled()


def _makers(modules: Sequence[NamedModule]) -> dict[str, list[nn.Module]]:
    """Return, by module, the layers with weights inside of it, or else the last one before it."""
    found: dict[str, list[nn.Module]] = {}
    last: nn.Module | None = None
    for module in modules:
        inside = [m for m in module.written.modules() if _has_weight(m)]
        if inside:
            found[module.name] = inside
            if _has_weight(module.written):
                last = module.written
        elif last is not None:
            found[module.name] = [last]
    return found


def _has_weight(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), torch.Tensor)


def _last_leaves(model: WatchedModel) -> set[str]:
    """Return the modules that end the model, or one of its parts with several layers.

    A sigmoid there is an output: a confident one is near its bounds, as it should be.
    """
    tops: dict[str, list[str]] = {}
    leaves = [each.name for each in model.modules if not any(each.written.children())]
    for name in leaves:
        tops.setdefault(name.partition(".")[0], []).append(name)
    ends = {group[-1] for group in tops.values() if len(group) > 1}
    return ends | set(leaves[-1:])
