"""Train a small language model on bytes, alone or under torchrun, with or without distmon.

    python launch/train.py --steps 300 --monitor
    torchrun --nproc-per-node 2 launch/train.py --steps 300 --monitoring

`--monitor` and `--monitoring` are the same. torchrun takes a bare `--monitor` for an abbreviation
of its own `--monitor-interval` and stops, unless `--` stands before the script.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch
from arrangement import Arrangement, Conditions, MicroBatch
from arrangements import arrange
from bad_input import BadInput
from burdens import BURDENS, Burden, plan_burden
from display import Display, make_console
from evaluation import evaluate_and_tell
from faults import Fault, plan_fault
from interruption import Interruption
from monitoring import STOPPED, Monitor, attach_monitor
from optimization import build_optimizer, learning_rate, set_learning_rate
from preparation import Beginning, Setup, prepare
from ranks import Ranks, join_ranks
from rich.console import Console
from whole_state import gather_state, restore_optimizer

RECENT = 20  # steps that the final training loss is averaged over


@dataclass(frozen=True)
class Training:
    """What the training loop works with, in place on every rank."""

    setup: Setup
    arrangement: Arrangement
    optimizer: torch.optim.Optimizer
    fault: Fault | None
    burden: Burden | None
    monitor: Monitor | None

    @property
    def monitor_step(self) -> int:
        """The step that the monitor was told of last."""
        return int(self.monitor.state_dict()["step"]) if self.monitor else 0


@dataclass(frozen=True)
class Outcome:
    """How the training loop ended."""

    step: int
    train_loss: float
    validation_loss: float | None
    code: int = 0
    """What the process ends with."""
    reason: str = "done:"
    """Why it ended, as the beginning of a sentence that goes on with the number of steps."""


def assemble(
    setup: Setup, beginning: Beginning, arrangement: Arrangement, console: Console
) -> Training:
    """Put everything in place for the first step. Bad input found here ends all ranks."""
    options, ranks = setup.options, setup.ranks
    shapes = arrangement.holdings.shapes
    plain = build_optimizer(
        arrangement.parameters, shapes, options.lr, options.weight_decay, options.optimizer
    )
    optimizer = ranks.together(
        lambda: arrangement.adopt(plain, setup.batches.sequences, options.clip)
    )
    restore_optimizer(beginning.optimizer, arrangement, optimizer)
    fault: Fault | None = None
    burden: Burden | None = None
    if options.fault:
        request = options.fault
        if request.kind in BURDENS:
            slower = options.inject_seconds
            burden = ranks.together(lambda: plan_burden(request, slower, arrangement))
        else:
            fault = ranks.together(lambda: plan_fault(request, arrangement))
    monitor: Monitor | None = None
    if options.monitor:
        asked = options.monitor
        monitor = ranks.together(
            lambda: attach_monitor(
                asked,
                arrangement.module,
                optimizer,
                console,
                options.steps,
                beginning.monitor,
                ranks.share(options.batch_size * options.context),
                lambda: save(training, training.monitor_step),
            )
        )
        if options.tasks:
            arrangement.show_tasks = monitor.task_losses
    training = Training(setup, arrangement, optimizer, fault, burden, monitor)
    return training


def micro_batches(setup: Setup, fault: Fault | None, step: int) -> list[MicroBatch]:
    """This rank's part of the data of a step; the loss of the step is the mean over all of it."""
    count, device = setup.division.micro_batches, setup.device
    found = []
    for micro in range(count):
        inputs, targets = setup.batches.micro_batch(step, micro)
        scale = 1.0
        if fault:
            inputs, targets, scale = fault.spoil_batch(step, inputs, targets)
        found.append(MicroBatch(inputs.to(device), targets.to(device), scale / count))
    return found


def train(training: Training, display: Display) -> Outcome:
    """The training loop. Evaluates and saves on the way and, whatever happens, at the end.

    Only when a rule of the monitor ends it, nothing is saved unless that was asked for too: the
    weights may be spoiled, and older checkpoints would make room for them.
    """
    setup, arrangement, optimizer = training.setup, training.arrangement, training.optimizer
    fault, burden, monitor = training.fault, training.burden, training.monitor
    options, ranks = setup.options, setup.ranks
    tokens = ranks.share(options.batch_size * options.context)
    monitor_prints = setup.monitor_plan is not None and setup.monitor_plan.prints_loss
    # Decided by rank 0, which owns the terminal, because printing a loss takes a collective.
    prints_loss = bool(ranks.total(torch.tensor(int(ranks.is_main and not display.has_bar))))
    prints_loss = prints_loss and not monitor_prints
    recent: deque[torch.Tensor] = deque(maxlen=RECENT)
    validation_loss: float | None = None
    code, reason = 0, "done:"

    def evaluate(step: int) -> float:
        return evaluate_and_tell(setup, arrangement, monitor, display, step, recent)

    if options.eval_every and setup.first == 0:
        evaluate(0)
    try:
        with Interruption(ranks) as interruption:
            for step in range(setup.first + 1, options.steps + 1):
                lr = learning_rate(
                    step, options.steps, options.warmup, options.lr, options.schedule
                )
                set_learning_rate(optimizer, lr)
                planted = fault or burden
                if planted and step == max(planted.at, setup.first + 1):
                    display.line(planted.describe(), style="dim")
                if burden:
                    burden.before_data(step)

                loss = arrangement.gradients(micro_batches(setup, fault, step))
                recent.append(arrangement.shown(loss))
                if fault:
                    fault.after_backward(step)
                norm = arrangement.gradient_norm()
                if monitor:
                    monitor.check(grad_norm=norm)
                arrangement.clip(norm, options.clip)
                optimizer.step()
                if fault:
                    fault.after_step(step)
                if monitor:
                    monitor.step(loss=loss, tokens=tokens, lr=lr, step=step)
                optimizer.zero_grad()

                display.advance(step, recent[-1])
                if prints_loss and (step % options.log_every == 0 or step == options.steps):
                    display.log(step, ranks.mean(recent[-1]), lr)
                stopping = step == options.steps or interruption.requested(step)
                if options.eval_every and (step % options.eval_every == 0 or step == options.steps):
                    validation_loss = evaluate(step)
                if options.save_every and (step % options.save_every == 0 or stopping):
                    save(training, step)
                if stopping:
                    break
        if step < options.steps:
            code, reason = 130, "interrupted after"
    except SystemExit as stopped:
        if stopped.code != STOPPED:
            raise
        code, reason = STOPPED, f"{stopped};"
    train_loss = ranks.mean(torch.stack([*recent]).mean())
    return Outcome(step, train_loss, validation_loss, code, reason)


def save(training: Training, step: int) -> None:
    """Write a checkpoint; every rank calls it, because each has its piece of the state."""
    monitor, setup = training.monitor, training.setup
    state = monitor.state_dict() if monitor else None
    gathered = gather_state(training.arrangement, training.optimizer)
    if gathered is None:
        return
    content: dict[str, Any] = {
        "model": gathered.weights,
        "optimizer": gathered.optimizer,
        "shape": asdict(setup.options.shape),
        "algorithm": setup.options.optimizer,
    }
    if state is not None:
        content["monitor"] = state
    setup.saver.save(step, content)


def summary(setup: Setup, outcome: Outcome, seconds: float) -> str:
    """The last line of the run: how it went and where things are."""
    steps = f"{outcome.step}/{setup.options.steps} steps"
    parts = [f"{outcome.reason} {steps}"]
    parts.append(f"train_loss {outcome.train_loss:.4f}")
    if outcome.validation_loss is not None:
        parts.append(f"val_loss {outcome.validation_loss:.4f}")
    parts.append(f"{seconds:.1f} s")
    if setup.monitor_plan:
        parts.append(f"run folder {setup.monitor_plan.run_dir}")
    if setup.saver.written:
        parts.append(f"checkpoint {setup.saver.written[-1]}")
    return ", ".join(parts)


def conduct(training: Training, console: Console) -> int:
    """Train with everything in place and say how it went; returns the exit code."""
    setup, options = training.setup, training.setup.options
    started = time.perf_counter()
    display = Display(console, options.steps, setup.first, options.batch_size * options.context)
    try:
        with display:
            outcome = train(training, display)
    finally:
        if training.monitor:
            training.monitor.close()
    display.line(summary(setup, outcome, time.perf_counter() - started))
    if outcome.code:
        setup.ranks.wait()
    return outcome.code


def run(arguments: list[str], ranks: Ranks) -> int:
    """Everything between joining the other ranks and leaving them; returns the exit code."""
    console = make_console(ranks.is_main)
    setup, beginning = ranks.together(lambda: prepare(arguments, ranks))
    options = setup.options
    conditions = Conditions(
        setup.division, ranks, setup.device, options.bf16, options.compile, options.kind_weight
    )
    arrangement = arrange(beginning.model, conditions)
    try:
        training = assemble(setup, beginning, arrangement, console)
        del beginning  # a rank that holds a piece of the model does not keep the whole
        return conduct(training, console)
    finally:
        arrangement.release()


def main(arguments: list[str] | None = None) -> int:
    """Run the trainer; returns the exit code. Bad input found on any rank ends all with code 2."""
    ranks = join_ranks()
    try:
        return run(sys.argv[1:] if arguments is None else arguments, ranks)
    except BadInput as problem:
        # Found by one rank alone while training, such as a full disk: torchrun ends the others.
        ranks.complain(str(problem))
        return 2
    finally:
        ranks.leave()


if __name__ == "__main__":
    sys.exit(main())
