"""`python -m benchmarks.first_look`: edits, first thing seen and after how long, by way to monitor.

One small language model is trained by a loop of its own and by the Trainer of transformers. Each
way adds its lines to that script; the script runs in a process of its own, and the clock runs from
the start of the process. What counts is the first line about the training beyond what the script
prints.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LOOP: Final = """
import torch
{imports}
torch.manual_seed(0)
layers = [torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(4)]
model = torch.nn.Sequential(torch.nn.Embedding(64, 32), *layers, torch.nn.Linear(32, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
{attach}
for step in range(1, {steps} + 1):
    tokens = torch.randint(64, (4, 17))
    scores = model(tokens[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {step}
    if step == 1:
        print("first step", flush=True)
{end}
"""
TRAINER: Final = """
import torch, transformers
{imports}
config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=4)
rows = [{{"input_ids": (row := torch.randint(64, (16,))), "labels": row}} for _ in range(512)]
class First(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            print("first step", flush=True)
settings = transformers.TrainingArguments(
    "out", max_steps={steps}, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
)
model = transformers.GPT2LMHeadModel(config)
trainer = transformers.Trainer(model, settings, train_dataset=rows, callbacks=[First()])
{attach}
trainer.train()
{end}
"""
SEEN_BY_WANDB: Final = """
import wandb.sdk.wandb_run as _runs
_log = _runs.Run._log
def _noted(self, data, *args, **kwargs):
    if any(key.startswith("gradients/") for key in data):
        print("measured: histograms of the gradients are logged", flush=True)
        _runs.Run._log = _log
    return _log(self, data, *args, **kwargs)
_runs.Run._log = _noted
"""
"""wandb shows nothing in the terminal: note when the first histogram is on its way to its page."""


@dataclass(frozen=True)
class Way:
    """A way to monitor: the lines that it adds, and how its first line looks."""

    name: str
    script: str
    seen: str
    """Pattern of the first line about the training."""
    imports: str = ""
    attach: str = ""
    step: str = "pass"
    end: str = ""
    launcher: tuple[str, ...] = ()
    hidden: str = ""
    """Lines of the measurement itself, which a user does not write."""
    edits: int = field(init=False)

    def __post_init__(self) -> None:
        lines = "\n".join((self.imports, self.attach, self.step.replace("pass", ""), self.end))
        object.__setattr__(self, "edits", len([line for line in lines.split("\n") if line.strip()]))


RUN: Final = (sys.executable, "-m", "distmon.cli.main", "run")
WAYS: Final = (
    Way("distmon run, own loop", LOOP, r"^step:", launcher=RUN),
    Way(
        "distmon.attach",
        LOOP,
        r"^step:",
        "import distmon",
        "monitor = distmon.attach(model, optimizer)",
        "monitor.step(loss=loss)",
        "monitor.close()",
    ),
    Way(
        "wandb.watch (offline)",
        LOOP,
        r"^measured: ",
        "import wandb",
        'wandb.init(mode="offline")\nwandb.watch(model, log="all")',
        'wandb.log({"loss": loss.item()})',
        "wandb.finish()",
        hidden=SEEN_BY_WANDB,
    ),
    Way(
        "print every 100 steps",
        LOOP,
        r"^loss ",
        step='print("loss", loss.item(), flush=True) if step % 100 == 0 else None',
    ),
    Way("distmon run, Trainer", TRAINER, r"^step:", launcher=RUN),
    Way(
        "DistmonCallback",
        TRAINER,
        r"^step:",
        "from distmon.integrations.transformers import DistmonCallback",
        "trainer.add_callback(DistmonCallback())",
    ),
    Way("Trainer's own log", TRAINER, r"^\{'loss'"),
)


def look(way: Way, steps: int, folder: Path) -> tuple[float, float, str]:
    """Run a way; return seconds until the first step, until the first line, and that line."""
    script = folder / "train.py"
    text = way.script.format(
        imports=way.hidden + way.imports, attach=way.attach, step=way.step, end=way.end, steps=steps
    )
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_SILENT": "true"}
    command = [*(way.launcher or (sys.executable,)), str(script)]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, bufsize=1,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    killer = threading.Timer(180, process.kill)
    killer.start()
    first_step = seen = float("nan")
    line_seen = "nothing"
    assert process.stdout is not None
    for line in process.stdout:
        now = time.perf_counter() - begin
        if line.startswith("first step"):
            first_step = now
        if seen != seen and re.search(way.seen, line):
            seen, line_seen = now, line.strip()
    killer.cancel()
    if process.wait() != 0:
        line_seen = f"exit code {process.returncode}"
    return first_step, seen, line_seen


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1020, help="half of them with the Trainer")
    options = parser.parse_args()
    print("| way | edited lines | first step after | first thing seen | after |")
    print("|---|---|---|---|---|", flush=True)
    for way in WAYS:
        steps = options.steps if way.script is LOOP else options.steps // 2
        with tempfile.TemporaryDirectory() as folder:
            first, seen, line = look(way, steps, Path(folder))
        shown = f"`{line[:72]}`"
        print(f"| {way.name} | {way.edits} | {first:.1f} s | {shown} | {seen:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
