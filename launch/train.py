"""Train a small language model on bytes, alone or under torchrun, with or without distmon.

    python launch/train.py --steps 300 --monitor
    torchrun --nproc-per-node 2 launch/train.py --steps 300 --monitoring

`--monitor` and `--monitoring` are the same. torchrun takes a bare `--monitor` for an abbreviation
of its own `--monitor-interval` and stops, unless `--` stands before the script.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch
from bad_input import BadInput
from checkpoints import Checkpoints, find_checkpoint, read_checkpoint, restore
from corpus import Batches, Corpus, load_corpus, validation_starts, windows
from display import Display, make_console
from faults import Fault, plan_fault
from gpt import GPT, loss_of
from interruption import Interruption
from monitoring import Monitor, MonitorPlan, attach_monitor, check_monitor
from optimization import build_optimizer, learning_rate, set_learning_rate
from options import Options, read_options
from ranks import Ranks, join_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RECENT = 20  # steps that the final training loss is averaged over


@dataclass(frozen=True)
class Setup:
    """Everything a run needs, checked; nothing of it has talked to another rank yet."""

    options: Options
    ranks: Ranks
    device: torch.device
    corpus: Corpus
    batches: Batches
    model: GPT
    optimizer: torch.optim.Optimizer
    saver: Checkpoints
    fault: Fault | None
    first: int
    """Steps done before, by the run that is resumed."""
    monitor_plan: MonitorPlan | None
    monitor_state: dict[str, Any] | None


@dataclass(frozen=True)
class Outcome:
    """How the training loop ended."""

    step: int
    train_loss: float
    validation_loss: float | None
    interrupted: bool


def prepare(arguments: list[str], ranks: Ranks) -> Setup:
    """Read every input of the run. Raises `BadInput`; calls no collective."""
    options = read_options(arguments, ranks.world, speaks=ranks.is_main)
    plan = check_monitor(options.monitor) if options.monitor else None
    device = ranks.device(options.device)
    corpus = load_corpus(options.data, options.corpus_mb, options.context)
    torch.manual_seed(options.seed)
    model = GPT(options.shape).to(device)
    optimizer = build_optimizer(model, options.lr, options.weight_decay)
    saver = Checkpoints(options.checkpoint_dir, options.keep)
    if options.save_every and ranks.is_main:
        saver.open()
    first, monitor_state = 0, None
    if options.resume:
        path = find_checkpoint(options.resume, options.checkpoint_dir)
        content = read_checkpoint(path, options.shape)
        first = restore(content, model, optimizer)
        monitor_state = content.get("monitor")
        if first >= options.steps:
            raise BadInput(f"{path} is at step {first} already; give --steps a larger number")
    fault = None
    if options.inject:
        fault = plan_fault(
            options.inject,
            options.inject_at,
            options.inject_param,
            options.inject_rank,
            model,
            ranks.rank,
            ranks.world,
            options.seed,
        )
    batches = Batches(
        corpus.train,
        options.context,
        options.batch_size,
        options.accumulate,
        ranks.rank,
        ranks.world,
        options.seed,
    )
    return Setup(
        options=options,
        ranks=ranks,
        device=device,
        corpus=corpus,
        batches=batches,
        model=model,
        optimizer=optimizer,
        saver=saver,
        fault=fault,
        first=first,
        monitor_plan=plan,
        monitor_state=monitor_state,
    )


def wrap(setup: Setup) -> nn.Module:
    """The model as it is called in training: replicated and compiled as asked."""
    model: nn.Module = setup.model
    if setup.ranks.grouped:
        model = DistributedDataParallel(model)
    return torch.compile(model) if setup.options.compile else model  # type: ignore[return-value]


def compute_gradients(setup: Setup, model: nn.Module, step: int) -> torch.Tensor:
    """Backward over the micro-batches of a step; returns this rank's loss, on the device."""
    micro_batches = setup.options.accumulate
    total = torch.zeros((), device=setup.device)
    for micro in range(micro_batches):
        inputs, targets = setup.batches.micro_batch(step, micro)
        scale = 1.0
        if setup.fault:
            inputs, targets, scale = setup.fault.spoil_batch(step, inputs, targets)
        last = micro == micro_batches - 1
        # Ranks exchange gradients once a step, with the last micro-batch.
        wait = setup.ranks.grouped and not last
        with model.no_sync() if wait else contextlib.nullcontext():
            with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.options.bf16):
                logits = model(inputs.to(setup.device))
            loss = loss_of(logits, targets.to(setup.device)) * (scale / micro_batches)
            loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(setup: Setup) -> float:
    """The loss on a fixed part of the validation text. Every rank must call it."""
    options, ranks, text = setup.options, setup.ranks, setup.corpus.validation
    starts = validation_starts(
        len(text), options.context, options.eval_sequences, ranks.rank, ranks.world
    )
    total = torch.zeros(2, device=setup.device)
    # At most as many sequences at once as in training, so that evaluation fits into memory too.
    for at in range(0, len(starts), setup.batches.sequences):
        chunk = starts[at : at + setup.batches.sequences]
        inputs, targets = windows(text, chunk, options.context)
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=options.bf16):
            logits = setup.model(inputs.to(setup.device))
        total[0] += loss_of(logits, targets.to(setup.device)) * len(chunk)
        total[1] += len(chunk)
    summed, count = ranks.total(total).tolist()
    return summed / count


def train(setup: Setup, model: nn.Module, monitor: Monitor | None, display: Display) -> Outcome:
    """The training loop. Evaluates and saves on the way and, whatever happens, at the end."""
    options, ranks, fault, optimizer = setup.options, setup.ranks, setup.fault, setup.optimizer
    parameters = list(setup.model.parameters())
    tokens = options.batch_size * options.context // ranks.world
    monitor_prints = setup.monitor_plan is not None and setup.monitor_plan.prints_loss
    # Decided by rank 0, which owns the terminal, because printing a loss takes a collective.
    prints_loss = bool(ranks.total(torch.tensor(int(ranks.is_main and not display.has_bar))))
    prints_loss = prints_loss and not monitor_prints
    recent: deque[torch.Tensor] = deque(maxlen=RECENT)
    validation_loss: float | None = None

    def evaluate_and_show(step: int) -> float:
        value = evaluate(setup)
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

            loss = compute_gradients(setup, model, step)
            if fault:
                fault.after_backward(step)
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            if monitor:
                monitor.check(grad_norm=norm)
            nn.utils.clip_grads_with_norm_(parameters, options.clip, norm)
            optimizer.step()
            if fault:
                fault.after_step(step)
            if monitor:
                monitor.step(loss=loss, tokens=tokens, lr=lr, step=step)
            optimizer.zero_grad()

            recent.append(loss)
            display.advance(step, loss)
            if prints_loss and (step % options.log_every == 0 or step == options.steps):
                display.log(step, ranks.mean(loss), lr)
            stopping = step == options.steps or interruption.requested(step)
            if options.eval_every and (step % options.eval_every == 0 or step == options.steps):
                validation_loss = evaluate_and_show(step)
            if options.save_every and (step % options.save_every == 0 or stopping):
                save(setup, monitor, step)
            if stopping:
                break
    return Outcome(
        step, ranks.mean(torch.stack(list(recent)).mean()), validation_loss, step < options.steps
    )


def save(setup: Setup, monitor: Monitor | None, step: int) -> None:
    """Write a checkpoint; every rank calls it, because the monitor's state may take all of them."""
    state = monitor.state_dict() if monitor else None
    if not setup.ranks.is_main:
        return
    content: dict[str, Any] = {
        "model": setup.model.state_dict(),
        "optimizer": setup.optimizer.state_dict(),
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


def run(arguments: list[str], ranks: Ranks) -> int:
    """Everything between joining the other ranks and leaving them; returns the exit code."""
    setup = ranks.together(lambda: prepare(arguments, ranks))
    options = setup.options
    console = make_console(ranks.is_main)
    model = wrap(setup)
    monitor: Monitor | None = None
    if options.monitor:
        request = options.monitor
        monitor = ranks.together(
            lambda: attach_monitor(
                request, model, setup.optimizer, console, options.steps, setup.monitor_state
            )
        )
    started = time.perf_counter()
    display = Display(console, options.steps, setup.first, options.batch_size * options.context)
    try:
        with display:
            outcome = train(setup, model, monitor, display)
    finally:
        if monitor:
            monitor.close()
    display.line(summary(setup, outcome, time.perf_counter() - started))
    return 130 if outcome.interrupted else 0


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
