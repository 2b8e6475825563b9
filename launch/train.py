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
from corpus import validation_starts, windows
from display import Display, make_console
from faults import Fault, plan_fault
from interruption import Interruption
from monitoring import Monitor, attach_monitor
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
    monitor: Monitor | None


@dataclass(frozen=True)
class Outcome:
    """How the training loop ended."""

    step: int
    train_loss: float
    validation_loss: float | None
    interrupted: bool


def assemble(
    setup: Setup, beginning: Beginning, arrangement: Arrangement, console: Console
) -> Training:
    """Put everything in place for the first step. Bad input found here ends all ranks."""
    options, ranks = setup.options, setup.ranks
    shapes = arrangement.holdings.shapes
    plain = build_optimizer(arrangement.parameters, shapes, options.lr, options.weight_decay)
    optimizer = ranks.together(
        lambda: arrangement.adopt(plain, setup.batches.sequences, options.clip)
    )
    restore_optimizer(beginning.optimizer, arrangement, optimizer)
    fault: Fault | None = None
    if options.fault:
        request = options.fault
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
            )
        )
    return Training(setup, arrangement, optimizer, fault, monitor)


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


def evaluate(setup: Setup, arrangement: Arrangement) -> float:
    """The loss on a fixed part of the validation text. Every rank must call it."""
    options, ranks, text = setup.options, setup.ranks, setup.corpus.validation
    starts = validation_starts(len(text), options.context, options.eval_sequences)
    mine = starts[setup.division.data_rank(ranks.rank) :: setup.division.data]
    # At most as many sequences at once as in training, so that evaluation fits into memory too.
    at_once = setup.batches.sequences
    total = torch.zeros(2, device=setup.device)
    # Ranks may need each other for every pass, so all do as many as the first, which has most.
    for at in range(0, len(starts[:: setup.division.data]), at_once):
        chunk = mine[at : at + at_once]
        inputs, targets = windows(text, chunk if len(chunk) else starts[:1], options.context)
        loss = arrangement.evaluate(inputs.to(setup.device), targets.to(setup.device))
        if loss is not None:
            total += torch.stack([loss, torch.ones_like(loss)]) * len(chunk)
    summed, count = ranks.total(total).tolist()
    return summed / count


def train(training: Training, display: Display) -> Outcome:
    """The training loop. Evaluates and saves on the way and, whatever happens, at the end."""
    setup, arrangement, optimizer = training.setup, training.arrangement, training.optimizer
    fault, monitor = training.fault, training.monitor
    options, ranks = setup.options, setup.ranks
    tokens = ranks.share(options.batch_size * options.context)
    monitor_prints = setup.monitor_plan is not None and setup.monitor_plan.prints_loss
    # Decided by rank 0, which owns the terminal, because printing a loss takes a collective.
    prints_loss = bool(ranks.total(torch.tensor(int(ranks.is_main and not display.has_bar))))
    prints_loss = prints_loss and not monitor_prints
    recent: deque[torch.Tensor] = deque(maxlen=RECENT)
    validation_loss: float | None = None

    def evaluate_and_show(step: int) -> float:
        value = evaluate(setup, arrangement)
        display.line(f"step:{step}/{options.steps} val_loss:{value:.4f}")
        return value

    if options.eval_every and setup.first == 0:
        evaluate_and_show(0)
    with Interruption(ranks) as interruption:
        for step in range(setup.first + 1, options.steps + 1):
            lr = learning_rate(step, options.steps, options.warmup, options.lr)
            set_learning_rate(optimizer, lr)
            if fault and step == max(fault.at, setup.first + 1):
                display.line(fault.describe(), style="dim")

            loss = arrangement.gradients(micro_batches(setup, fault, step))
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

            recent.append(arrangement.shown(loss))
            display.advance(step, recent[-1])
            if prints_loss and (step % options.log_every == 0 or step == options.steps):
                display.log(step, ranks.mean(recent[-1]), lr)
            stopping = step == options.steps or interruption.requested(step)
            if options.eval_every and (step % options.eval_every == 0 or step == options.steps):
                validation_loss = evaluate_and_show(step)
            if options.save_every and (step % options.save_every == 0 or stopping):
                save(training, step)
            if stopping:
                break
    return Outcome(
        step, ranks.mean(torch.stack(list(recent)).mean()), validation_loss, step < options.steps
    )


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
    }
    if state is not None:
        content["monitor"] = state
    setup.saver.save(step, content)


def summary(setup: Setup, outcome: Outcome, seconds: float) -> str:
    """The last line of the run: how it went and where things are."""
    steps = f"{outcome.step}/{setup.options.steps} steps"
    parts = [f"{'interrupted after' if outcome.interrupted else 'done:'} {steps}"]
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
    return 130 if outcome.interrupted else 0


def run(arguments: list[str], ranks: Ranks) -> int:
    """Everything between joining the other ranks and leaving them; returns the exit code."""
    console = make_console(ranks.is_main)
    setup, beginning = ranks.together(lambda: prepare(arguments, ranks))
    options = setup.options
    conditions = Conditions(setup.division, ranks, setup.device, options.bf16, options.compile)
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
