"""Train a small language model on bytes, alone or under torchrun, with or without distmon.

    python launch/train.py --steps 300 --monitor
    torchrun --nproc-per-node 2 -- launch/train.py --steps 300 --monitor

Without the `--`, torchrun takes `--monitor` for its own `--monitor-interval`; `--monitoring`, which
means the same, it passes on.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

if not __package__:  # started as a script: the folder of the package is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.checkpoint import Checkpoints
from launch.data import Batches, load_corpus
from launch.display import Display, make_console
from launch.faults import plan_fault
from launch.model import GPT
from launch.monitoring import STOPPED, attach_monitor, check_settings
from launch.optimizer import learning_rate
from launch.options import read_options
from launch.parallel import parallelism_class
from launch.ranks import BadInput, Ranks, interruptible, join_ranks

RECENT = 20  # steps that the reported training loss is averaged over
INTERRUPTED = 130  # exit code, as of a program that Ctrl-C has ended


class Trainer:
    """One training run. Every rank makes one and calls the same methods, which are collectives."""

    def __init__(self, arguments: list[str], ranks: Ranks, cleanup: ExitStack) -> None:
        self.ranks, self.console = ranks, make_console(ranks.is_main)
        with ranks.stop_together():
            self.options = options = read_options(arguments, ranks.world, ranks.is_main)
            config = check_settings(options.monitor_settings) if options.monitor else None
            self.device = ranks.device(options.device)
            corpus = load_corpus(options.data, options.corpus_mb, options.context)
            self.checkpoints = Checkpoints(options.checkpoint_dir, options.keep)
            if ranks.is_main and (options.save_every or (config and config.actions.checkpoint)):
                self.checkpoints.open()
            torch.manual_seed(options.seed)
            model = GPT(options.shape, options.init_std).to(self.device)
            saved = self.checkpoints.load(options) if options.resume else {}
            if options.resume:
                model.load_state_dict(saved.pop("model"))
        self.step = self.first_step = saved.get("step", 0)
        self.recent_losses: deque[torch.Tensor] = deque(maxlen=RECENT)
        self.validation_loss: float | None = None

        self.parallel = parallelism_class(options.parallel)(model, options, ranks, self.device)
        cleanup.callback(self.parallel.close)
        if saved.get("optimizer"):
            self.parallel.load_optimizer_state(saved["optimizer"])
        self.batches = Batches(corpus, options, self.parallel.sizes, ranks.rank, self.device)
        with ranks.stop_together():
            self.fault = plan_fault(options, self.parallel)
        self.run_dir = config.run_dir if config else None
        self.monitor = attach_monitor(self, saved.get("monitor")) if config else None

        self.display = Display(self.console, options.steps, self.step, options.tokens_per_step)
        # Rank 0 decides, because it has the terminal and printing a loss takes a collective.
        has_bar = bool(ranks.sum(torch.tensor(int(self.display.has_bar))))
        monitor_prints = config is not None and config.enabled and "console" in config.sinks
        self.prints_loss = not has_bar and not monitor_prints

    def train(self) -> int:
        """Run the training loop; return the exit code."""
        options, started = self.options, time.perf_counter()
        code, outcome = 0, "done:"
        try:
            with self.display.shown, interruptible(self.ranks) as interrupted:
                if options.eval_every and self.step == 0:
                    self.evaluate()
                while self.step < options.steps and not code:
                    self.train_step()
                    last = self.step == options.steps
                    if not last and interrupted(self.step):
                        code, outcome = INTERRUPTED, "interrupted after"
                    if is_due(self.step, options.eval_every, last):
                        self.evaluate()
                    if is_due(self.step, options.save_every, last or code == INTERRUPTED):
                        self.save_checkpoint()
        except SystemExit as stopped:
            if stopped.code != STOPPED:
                raise
            # Nothing is saved: the weights may be bad, and would replace older checkpoints.
            code, outcome = STOPPED, f"{stopped};"
        finally:
            if self.monitor:
                self.monitor.close()
        self.display.line(f"{outcome} {self.summary(time.perf_counter() - started)}")
        return code

    def train_step(self) -> None:
        """Take one optimizer step on the global batch."""
        options, parallel, fault, monitor = self.options, self.parallel, self.fault, self.monitor
        self.step = step = self.step + 1
        tokens = self.ranks.share(options.tokens_per_step)
        lr = learning_rate(step, options)
        for group in parallel.optimizer.param_groups:
            group["lr"] = lr
        if options.inject and step == max(options.inject_at, self.first_step + 1):
            self.display.line(fault.describe(), style="dim")

        with monitor.phase("data") if monitor else nullcontext():
            fault.act("data", step)
            batches = [fault.change_batch(step, each) for each in self.batches.of_step(step)]
        loss = parallel.forward_backward(batches)
        self.recent_losses.append(parallel.displayed_loss(loss))
        fault.act("gradients", step)
        grad_norm = parallel.gradient_norm()
        if monitor:
            monitor.check(grad_norm=grad_norm)
        parallel.optimizer_step(grad_norm)
        fault.act("weights", step)
        if monitor and not parallel.reports_steps:
            monitor.step(loss=loss, tokens=tokens, lr=lr, step=step)
        parallel.optimizer.zero_grad()

        self.display.advance(step, self.recent_losses[-1])
        if self.prints_loss and (step % options.log_every == 0 or step == options.steps):
            self.display.log(step, self.ranks.mean(self.recent_losses[-1]), lr)

    def evaluate(self) -> None:
        """Compute the loss on a fixed part of the validation text, and report it."""
        options = self.options
        total = torch.zeros(2, device=self.device)
        for inputs, targets, weight in self.batches.validation():
            loss = self.parallel.evaluate(inputs, targets)
            if loss is not None:
                total += torch.stack([loss, torch.ones_like(loss)]) * weight
        summed, count = self.ranks.sum(total).tolist()
        self.validation_loss = summed / count
        self.display.line(f"step:{self.step}/{options.steps} val_loss:{self.validation_loss:.4f}")
        if self.monitor:
            epoch = self.step * options.tokens_per_step / len(self.batches.corpus.train)
            train_loss, val_loss = self.recent_loss(), self.validation_loss
            self.monitor.evaluated(train_loss=train_loss, val_loss=val_loss, epoch=epoch)

    def recent_loss(self) -> float | None:
        """Return the mean training loss of the last steps; None before the first."""
        if not self.recent_losses:
            return None
        return self.ranks.mean(torch.stack([*self.recent_losses]).mean())

    def save_checkpoint(self) -> None:
        """Write a checkpoint that any parallelism on any number of ranks can resume from."""
        weights, optimizer_state = self.parallel.full_state()
        if self.ranks.is_main:
            content = {"model": weights, "optimizer": optimizer_state}
            content |= {"shape": asdict(self.options.shape), "algorithm": self.options.optimizer}
            if self.monitor:
                content["monitor"] = self.monitor.state_dict()
            self.checkpoints.save(self.step, content)

    def summary(self, seconds: float) -> str:
        """Return how the run went and where things are."""
        parts = [f"{self.step}/{self.options.steps} steps", f"train_loss {self.recent_loss():.4f}"]
        if self.validation_loss is not None:
            parts.append(f"val_loss {self.validation_loss:.4f}")
        parts.append(f"{seconds:.1f} s")
        if self.run_dir:
            parts.append(f"run folder {self.run_dir}")
        if self.checkpoints.written:
            parts.append(f"checkpoint {self.checkpoints.written[-1]}")
        return ", ".join(parts)


def is_due(step: int, every: int, last: bool) -> bool:
    """Return whether to do now what is done `every` steps, 0 for never, and at the last."""
    return every > 0 and (step % every == 0 or last)


def run(arguments: list[str], ranks: Ranks) -> int:
    """Train on ranks that have joined, and return the exit code."""
    with ExitStack() as cleanup:
        code = Trainer(arguments, ranks, cleanup).train()
        if code:
            ranks.gather(None)  # torchrun ends all ranks when the first exits with a code
    return code


def main(arguments: list[str] | None = None) -> int:
    """Join the ranks, train and leave; return the exit code."""
    ranks = join_ranks()
    try:
        return run(sys.argv[1:] if arguments is None else arguments, ranks)
    except BadInput as error:
        # Found by one rank while training, such as a full disk: torchrun ends the others.
        ranks.complain(error)
        return 2
    finally:
        ranks.leave()


if __name__ == "__main__":
    sys.exit(main())
