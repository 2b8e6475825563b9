"""`distmon bench`: what watching costs on the user's own model, next to other ways to watch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from distmon.errors import ConfigError
from distmon.verify.workloads import find_factory

Step = Callable[[nn.Module], torch.Tensor]
"""A forward pass on a batch of its own; returns the loss."""


@dataclass(frozen=True)
class Batch:
    """A random batch for a model that comes without data: noise, or integers below `below`."""

    shape: tuple[int, ...]
    below: int | None

    @classmethod
    def parse(cls, text: str) -> Batch:
        """`8x128` is noise, `8x128:50257` is integers below 50257."""
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*(:[1-9]\d*)?", text):
            raise ConfigError(
                '--batch must be a shape such as "8x128", or "8x128:50257" for integers below '
                f'50257, not "{text}"'
            )
        shape, _, below = text.partition(":")
        return cls(tuple(int(n) for n in shape.split("x")), int(below) if below else None)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Mean square of what the model makes of it, or the one number that it makes."""
        weight = next(model.parameters())
        if self.below is None:
            batch = torch.randn(self.shape, device=weight.device, dtype=weight.dtype)
        else:
            batch = torch.randint(self.below, self.shape, device=weight.device)
        output = model(batch)
        if isinstance(output, (tuple, list)) and output:
            output = output[0]
        output = getattr(output, "logits", output)
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"the model returns a {type(output).__name__}, not a tensor")
        return output if output.ndim == 0 else output.float().square().mean()


class UsersModel:
    """`module:factory` of a user. Another process can be given it: it calls the factory anew."""

    def __init__(self, source: str, batch: Batch | None) -> None:
        self._source = source
        self._batch = batch
        self._step: Step | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_step": None}

    def build(self) -> nn.Module:
        """Call the factory; a mistake is a `ConfigError`."""
        source = self._source
        try:
            factory = find_factory(source)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's module does
            module = source.partition(":")[0]
            raise ConfigError(f'cannot import "{module}" of --model: {_text(error)}') from error
        try:
            made = factory()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{source}() raises {_text(error)}") from error
        model, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module) or not (step is None or callable(step)):
            raise ConfigError(f"{source}() must return a model, or (model, step)")
        if step is None and self._batch is None:
            raise ConfigError(
                f'{source}() returns a model alone: say --batch, such as "8x128", or return '
                "(model, step) where step(model) is the loss"
            )
        if step is not None and self._batch is not None:
            raise ConfigError(f"{source}() returns a step with the model: --batch has no place")
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"the model of {source}() has no parameter that learns")
        self._step = step
        return model

    def loss(self, model: nn.Module, _: torch.device) -> torch.Tensor:
        """Of the model that `build` made last."""
        if self._step is not None:
            return self._step(model)
        assert self._batch is not None  # `build` has seen to it
        return self._batch.loss(model)


def run_benchmark(
    console: Console,
    model: str,
    batch: str | None,
    contenders: str | None,
    rounds: int,
    limit: float,
    out: Path | None,
) -> bool:
    """Measure, write and print; False when an answer of distmon was wrong."""
    if importlib.util.find_spec("psutil") is None:
        raise ConfigError("distmon bench needs psutil: pip install 'distmon[bench]'")
    from distmon_benchmarks import overhead, page, results, table
    from distmon_benchmarks.contenders import CONTENDERS, find
    from distmon_benchmarks.workloads import Workload

    if rounds < 2:
        raise ConfigError(f"--rounds must be at least 2, not {rounds}")
    if not limit > 0:
        raise ConfigError(f"--limit must be above 0 seconds, not {limit:g}")
    names = [c.name for c in CONTENDERS]
    wanted = _names(contenders, names)
    users = UsersModel(model, None if batch is None else Batch.parse(batch))
    folder = out or Path("runs") / f"bench-{re.sub(r'[^A-Za-z0-9_]+', '-', model)}"
    conditions = model if batch is None else f"{model}, batch {batch}"
    workload = Workload(model, conditions, users.build, users.loss)
    dtype = _try_step(model, users, workload)
    _try_folder(folder)
    plan = overhead.Plan(
        [(workload, dtype)], find(wanted), rounds, limit, ranks=(), parallel=(), full=False
    )
    overhead.run(plan, folder, console)
    path = page.write(folder)
    table.show(folder, console)
    console.print(f"written to {folder}; the page is {path}", markup=False, highlight=False)
    return not any(name.startswith("distmon") for name in results.read(folder).context.wrong)


def _names(contenders: str | None, names: Sequence[str]) -> list[str]:
    if contenders is None:
        return [*names]
    wanted = [part.strip() for part in contenders.split(",") if part.strip()]
    unknown = [name for name in wanted if name not in names]
    if unknown or not wanted:
        known = ", ".join(names)
        raise ConfigError(f'--contenders must be of {known}, not "{", ".join(unknown)}"')
    return [*wanted, "none"]  # the bare step is what all are compared with


def _try_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to --out {folder}: {error.strerror}") from None


def _try_step(model: str, users: UsersModel, workload: Any) -> str:
    """One step with nobody watching, so that mistakes of the model show here; gives its dtype."""
    from distmon_benchmarks.training import Training
    from distmon_benchmarks.workloads import DTYPES

    torch.manual_seed(0)
    found = {p.dtype for p in users.build().parameters()}
    dtypes: list[str] = [name for name, dtype in DTYPES.items() if {dtype} == found]
    if not dtypes:
        listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise ConfigError(
            f"the parameters of {model}() must be all float32 or all bfloat16, not {listed}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        training = Training.begin(workload, dtypes[0], device)
        loss = users.loss(training.model, device)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError(f"the step of {model}() must return the loss, one number to learn by")
        if not bool(torch.isfinite(loss.detach())):
            raise ConfigError(f"the loss of {model}() is {float(loss.detach())} in the first step")
        loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"a training step of {model}() raises {_text(error)}") from error
    return dtypes[0]


def _text(error: BaseException) -> str:
    """The first line of an error: torch adds tracebacks of its own."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
