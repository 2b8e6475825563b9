"""`--parallel deepspeed`: a DeepSpeed engine, which has the optimizer and clips by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from arrangement import Arrangement, MicroBatch
from bad_input import BadInput
from gpt import GPT, loss_of
from holdings import Place
from torch import nn

HERE = Path(__file__).parent


class Zero(Arrangement):
    """The engine is made when there is an optimizer to give to it. Masters are float32.

    From then on `parameters` are this rank's pieces of the masters, laid out flat.
    """

    def wrap(self, model: GPT) -> tuple[nn.Module, nn.Module]:
        return model, model

    def adopt(
        self, optimizer: torch.optim.Optimizer, sequences: int, clip: float
    ) -> torch.optim.Optimizer:
        deepspeed = _import_deepspeed()
        config = _read_config(self.conditions.division.zero)
        config["train_micro_batch_size_per_gpu"] = sequences
        config["gradient_accumulation_steps"] = self.conditions.division.micro_batches
        config["gradient_clipping"] = clip
        if self.conditions.bf16:
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        names = {id(each): name for name, each in self.parameters.items()}
        shapes = self.holdings.shapes
        self._engine, *_ = deepspeed.initialize(
            model=self.module, optimizer=optimizer, config=config
        )
        self.module = self.evaluated = self._engine
        pieces = {names[id(each)]: piece for each, piece in _pieces(self._engine, optimizer)}
        self._places = {name: piece.place for name, piece in pieces.items()}
        self.parameters = {name: piece.view() for name, piece in pieces.items()}  # type: ignore[misc]
        self.holdings = self._survey(shapes)
        by_view = {self.parameters[name]: piece for name, piece in pieces.items()}
        return EngineOptimizer(self._engine, optimizer, by_view)  # type: ignore[return-value]

    def places(self, shapes: dict[str, torch.Size]) -> dict[str, Place]:
        return getattr(self, "_places", None) or super().places(shapes)

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches, start=1):
            self._engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            loss = loss_of(self._engine(batch.inputs), batch.targets) * batch.factor
            self._engine.backward(loss, scale_wrt_gas=False)
            total += loss.detach()
        return total

    def gradient_norm(self) -> torch.Tensor:
        """Only the engine knows it, and only when it steps."""
        return torch.zeros(())

    def clip(self, norm: torch.Tensor, limit: float) -> None:
        """The engine does."""

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        return loss_of(self.evaluated(inputs), targets)

    def release(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.destroy()


class Piece(NamedTuple):
    """Where a parameter lies: from `begin` on in a tensor that the inner optimizer steps."""

    master: torch.Tensor
    begin: int
    place: Place

    def view(self) -> torch.Tensor:
        return self.within(self.master.detach())

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(-1)[self.begin : self.begin + self.place.count]


class EngineOptimizer:
    """What the trainer needs of an optimizer, by way of the engine that has it."""

    def __init__(
        self, engine: Any, inner: torch.optim.Optimizer, pieces: Mapping[Any, Piece]
    ) -> None:
        self._engine, self._inner = engine, inner
        self.state = {view: PieceOfState(inner.state, piece) for view, piece in pieces.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self) -> None:
        """The engine has done it."""


class PieceOfState(MutableMapping[str, Any]):
    """The optimizer's state of one parameter, cut out of the state of the master it lies in."""

    def __init__(self, states: Any, piece: Piece) -> None:
        self._states, self._piece = states, piece

    def __getitem__(self, key: str) -> Any:
        value = self._states[self._piece.master][key]
        return self._piece.within(value) if self._is_cut(value) else value

    def __setitem__(self, key: str, value: Any) -> None:
        mine = self._states[self._piece.master]
        if torch.is_tensor(value) and value.ndim:
            if key not in mine:
                mine[key] = torch.zeros_like(self._piece.master, requires_grad=False)
            self._piece.within(mine[key]).copy_(value)
        else:
            mine[key] = value

    def __delitem__(self, key: str) -> None:
        del self._states[self._piece.master][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states.get(self._piece.master, {}))

    def __len__(self) -> int:
        return len(self._states.get(self._piece.master, {}))

    def _is_cut(self, value: Any) -> bool:
        return torch.is_tensor(value) and value.numel() == self._piece.master.numel() > 1


def _pieces(engine: Any, optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, Piece]]:
    """Every parameter of the optimizer and this rank's piece of it."""
    wrapper, rank, world = engine.optimizer, dist.get_rank(), dist.get_world_size()
    if wrapper is optimizer:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            yield parameter, Piece(parameter, 0, Place((0,), (parameter.numel(),), flat=True))
    elif hasattr(wrapper, "fp32_partitioned_groups_flat"):
        for number, parameters in enumerate(wrapper.fp16_groups):
            for parameter in parameters:
                _, begin, size = wrapper.grad_position[wrapper.get_param_id(parameter)]
                count = max(0, min(parameter.ds_numel - rank * size, size))
                place = Place((rank * size,), (count,), flat=True)
                yield parameter, Piece(wrapper.fp32_partitioned_groups_flat[number], begin, place)
    else:
        for parameters, vector, master in zip(
            wrapper.bit16_groups,
            wrapper.bit16_groups_flat,
            wrapper.single_partition_of_fp32_groups,
            strict=True,
        ):
            size = vector.numel() // world
            for parameter in parameters:
                offset = (parameter.data_ptr() - vector.data_ptr()) // vector.element_size()
                first = max(offset, rank * size)
                count = max(0, min(offset + parameter.numel(), (rank + 1) * size) - first)
                place = Place((first - offset,), (count,), flat=True)
                yield parameter, Piece(master, first - rank * size if count else 0, place)


def _import_deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise BadInput(
            f"--parallel deepspeed needs DeepSpeed ({error}): pip install 'distmon[deepspeed]'"
        ) from None
    if not torch.cuda.is_available():
        # It would compile its own collectives for minutes; gloo's do.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _read_config(stage: int) -> dict[str, Any]:
    """The example beside this file, without what the trainer brings itself."""
    if not stage:
        return {"zero_optimization": {"stage": 0}, "steps_per_print": 10**9}
    config: dict[str, Any] = json.loads((HERE / f"ds_zero{stage}.json").read_text())
    for brought in ("optimizer", "distmon"):
        config.pop(brought, None)
    return config
