"""Plant faults of the accelerator path one by one and see whether the checks notice them.

    python -m simulated_cuda.mutations        (from the folder `tests`)

Each mutation is made in a copy of the package; the checks run there until one fails. A mutation
that no check notices is printed as MISSED, and the exit code is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONE, TWO = "test_monitor_on_device.py", "test_monitor_ranks_on_device.py"


@dataclass(frozen=True)
class Mutation:
    """A text of a file, and what stands there instead."""

    fault: str
    file: str
    before: str
    after: str
    tests: str = ONE


MUTATIONS = (
    Mutation(
        "event on the stream of the current device",
        "distmon/device.py",
        "self._event.record(torch.accelerator.current_stream(device))",
        "self._event.record(torch.accelerator.current_stream())",
    ),
    Mutation(
        "event on the default stream, not the current one",
        "distmon/device.py",
        "self._event.record(torch.accelerator.current_stream(device))",
        "self._event.record(torch.Stream(stream_id=0, device_index=device.index, device_type=1))",
    ),
    Mutation(
        "no wait before pinned memory is read",
        "distmon/device.py",
        "        self._event.synchronize()",
        "        return",
    ),
    Mutation(
        "every mark counts as done",
        "distmon/device.py",
        "return bool(self._event.query())",
        "return True",
    ),
    Mutation(
        "mark before the copy that it stands for",
        "distmon/collect/losses.py",
        "            self._value.copy_(value.detach().reshape(()), non_blocking=True)\n"
        "            self._mark = DeviceMark(value.device)",
        "            self._mark = DeviceMark(value.device)\n"
        "            self._value.copy_(value.detach().reshape(()), non_blocking=True)",
    ),
    Mutation(
        "blocking copy to the host",
        "distmon/collect/losses.py",
        "self._value.copy_(value.detach().reshape(()), non_blocking=True)",
        "self._value.copy_(value.detach().reshape(()))",
    ),
    Mutation(
        "copy to the device from pageable memory",
        "distmon/device.py",
        "return host.pin_memory().to(device, non_blocking=True)",
        "return host.to(device, non_blocking=True)",
    ),
    Mutation(
        "an upload buffer that is written again before its copy has run",
        "distmon/device.py",
        "    return host.pin_memory().to(device, non_blocking=True)",
        "    pinned = host.pin_memory()\n"
        "    moved = pinned.to(device, non_blocking=True)\n"
        "    pinned.zero_()\n"
        "    return moved",
    ),
    Mutation(
        "a device number is read in step()",
        "distmon/collect/losses.py",
        "        value = local_loss(value)\n"
        "        if isinstance(value, torch.Tensor) and not value.is_cpu:\n"
        "            number",
        "        value = host_value(local_loss(value))\n"
        "        if isinstance(value, torch.Tensor) and not value.is_cpu:\n"
        "            number",
    ),
    Mutation(
        "hooks work while a graph is captured",
        "distmon/device.py",
        "    return bool(torch.cuda.is_current_stream_capturing())",
        "    return False",
    ),
    Mutation(
        "phases that the device has not passed are dropped",
        "distmon/collect/telemetry/phases.py",
        "        self._steps = waiting",
        "        self._steps = []",
    ),
    Mutation(
        "the compiler traces into the optimizer hooks",
        "distmon/monitor.py",
        "disable: Any = torch.compiler.disable",
        "disable: Any = lambda function: function",
    ),
    Mutation(
        "NaN counts wait for every tensor",
        "distmon/probe/exact.py",
        "found += (torch.isnan(part).sum(), torch.isinf(part).sum())",
        "found += (torch.isnan(part).sum().cpu(), torch.isinf(part).sum().cpu())",
    ),
    Mutation(
        "every optimizer of many has a pass of its own",
        "distmon/runtime/observation_cycle.py",
        "MOST_OPTIMIZERS = 8",
        "MOST_OPTIMIZERS = 1000",
    ),
    Mutation(
        "evidence is labelled with the step of the signal",
        "distmon/collect/finite_watch.py",
        "self.evidence = Evidence(step, now,",
        "self.evidence = Evidence(step, step,",
    ),
    Mutation(
        "rows of blocks on two devices",
        "distmon/collect/gradient_gain/backward_norms.py",
        "sums = _gathered([hooks.row.data for hooks in measured], into.device)",
        "sums = torch.stack([hooks.row.data for hooks in measured])",
    ),
    Mutation(
        "rows of blocks are read before they have arrived",
        "distmon/collect/gradient_gain/backward_norms.py",
        "    DeviceMark(table.device).wait()\n",
        "",
    ),
    Mutation(
        "checksums of the newest measurement, not of the one that was sent",
        "distmon/runtime/observer.py",
        "self._sent_checksums = self._probe.row_checksums.clone()",
        "self._sent_checksums = self._probe.row_checksums",
        TWO,
    ),
    Mutation(
        "the interpreter of Triton reads device addresses on the host",
        "distmon/probe/backend.py",
        'device.type == "cuda" and os.environ.get("TRITON_INTERPRET") == "1"',
        "False",
    ),
)


def main() -> int:
    """Try all mutations; return 1 when one was missed."""
    missed = 0
    for mutation in MUTATIONS:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            ignored = shutil.ignore_patterns(".git", ".venv", "runs", ".*_cache")
            shutil.copytree(ROOT, copy, ignore=ignored)
            path = copy / mutation.file
            text = path.read_text()
            if mutation.before not in text:
                print(f"STALE   {mutation.fault}: {mutation.file} has changed", flush=True)
                missed += 1
                continue
            path.write_text(text.replace(mutation.before, mutation.after))
            command = ["-m", "pytest", "-q", "-x", f"tests/simulated_cuda/{mutation.tests}"]
            environment = {**os.environ, "PYTHONPATH": str(copy)}
            done = subprocess.run(
                [sys.executable, *command],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
            missed += not failed
            by = failed[0].split("[")[-1].split("]")[0] if failed else ""
            print(f"{'caught ' if failed else 'MISSED '} {mutation.fault}  {by}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
