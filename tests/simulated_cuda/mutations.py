"""Plant faults of the accelerator path one by one and see whether the checks notice them.

    python -m simulated_cuda.mutations        (from the folder `tests`)

Each mutation is made in a copy of the package, where its check is run. A mutation that it does not
notice is printed as MISSED, and the exit code is 1. With arguments: the mutations whose names have
one of them as a part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from simulated_cuda.child import names_of, run_checks
from simulated_cuda.recorded_launches import driver_environment

ROOT = Path(__file__).parents[2]
MODULES = {1: ("monitor_checks", "monitor_step_checks"), 2: ("monitor_rank_checks",)}
"""By number of ranks; the names of checks differ."""
COPIED = ("distmon", "csrc_triton", "tests")
ENVIRONMENTS = {"no_float64_checks": {"SIMULATED_CUDA_NO_FLOAT64": "1"}}


@dataclass(frozen=True)
class Mutation:
    """A text of a file, and what stands there instead."""

    fault: str
    check: str
    """The check that notices it, or a test of the suite as `file.py::name`."""
    file: str
    before: str
    after: str
    ranks: int = 1
    module: str = ""
    """Module of the check, where it is not one of MODULES."""


MUTATIONS = (
    Mutation(
        "event on the stream of the current device",
        "check_a_number_of_another_device_arrives",
        "distmon/device.py",
        "self._event.record(torch.accelerator.current_stream(device))",
        "self._event.record(torch.accelerator.current_stream())",
    ),
    Mutation(
        "event on the default stream, not the current one",
        "check_observing_from_a_side_stream",
        "distmon/device.py",
        "self._event.record(torch.accelerator.current_stream(device))",
        "self._event.record(torch.Stream(stream_id=0, device_index=device.index, device_type=1))",
    ),
    Mutation(
        "no wait before pinned memory is read",
        "check_a_number_of_another_device_arrives",
        "distmon/device.py",
        "        self._event.synchronize()",
        "        return",
    ),
    Mutation(
        "every mark counts as done",
        "check_records_are_those_of_the_cpu_in_every_order",
        "distmon/device.py",
        "return bool(self._event.query())",
        "return True",
    ),
    Mutation(
        "mark before the copy that it stands for",
        "check_a_mark_stands_for_the_copy_before_it",
        "distmon/collect/losses.py",
        "            self._value.copy_(value.detach().reshape(()), non_blocking=True)\n"
        "            self._mark = DeviceMark(value.device)",
        "            self._mark = DeviceMark(value.device)\n"
        "            self._value.copy_(value.detach().reshape(()), non_blocking=True)",
    ),
    Mutation(
        "blocking copy to the host",
        "check_no_step_waits_with_numbers_of_the_device",
        "distmon/collect/losses.py",
        "self._value.copy_(value.detach().reshape(()), non_blocking=True)",
        "self._value.copy_(value.detach().reshape(()))",
    ),
    Mutation(
        "copy to the device from pageable memory",
        "check_no_step_waits_with_numbers_of_the_device",
        "distmon/device.py",
        "return host.pin_memory().to(device, non_blocking=True)",
        "return host.to(device, non_blocking=True)",
    ),
    Mutation(
        "an upload buffer that is written again before its copy has run",
        "check_records_are_those_of_the_cpu_in_every_order",
        "distmon/device.py",
        "    return host.pin_memory().to(device, non_blocking=True)",
        "    pinned = host.pin_memory()\n"
        "    moved = pinned.to(device, non_blocking=True)\n"
        "    pinned.zero_()\n"
        "    return moved",
    ),
    Mutation(
        "a device number is read in step()",
        "check_no_step_waits_with_numbers_of_the_device",
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
        "check_hooks_do_nothing_while_a_graph_is_captured",
        "distmon/device.py",
        "    return bool(torch.cuda.is_current_stream_capturing())",
        "    return False",
    ),
    Mutation(
        "phases that the device has not passed are dropped",
        "check_phases_are_kept_until_the_device_has_passed_them",
        "distmon/collect/telemetry/phases.py",
        "                self._steps.append(step)",
        "                pass",
    ),
    Mutation(
        "the compiler traces into the optimizer hooks",
        "check_compiling_the_optimizer_step_is_left_alone",
        "distmon/runtime/installed_hooks.py",
        "disable: Any = torch.compiler.disable",
        "disable: Any = lambda function: function",
    ),
    Mutation(
        "NaN counts wait for every tensor",
        "check_counting_nan_waits_once",
        "distmon/probe/exact.py",
        "found += (torch.isnan(part).sum(), torch.isinf(part).sum())",
        "found += (torch.isnan(part).sum().cpu(), torch.isinf(part).sum().cpu())",
    ),
    Mutation(
        "every optimizer of many has a pass of its own",
        "check_an_optimizer_per_parameter_costs_one_snapshot",
        "distmon/runtime/observation_cycle.py",
        "MOST_OPTIMIZERS: Final = 8",
        "MOST_OPTIMIZERS: Final = 1000",
    ),
    Mutation(
        "evidence is labelled with the step of the signal",
        "check_evidence_says_when_it_was_counted",
        "distmon/collect/finite_watch.py",
        "self.evidence = Evidence(step, now,",
        "self.evidence = Evidence(step, step,",
    ),
    Mutation(
        "a sampled NaN is labelled with the observed step",
        "check_a_sampled_nan_says_when_it_was_counted",
        "distmon/runtime/searches.py",
        "counts, of_step, counted_at = self._count(), local.step, self._now()",
        "counts, of_step, counted_at = self._count(), local.step, 0",
    ),
    Mutation(
        "rows of blocks on two devices",
        "check_blocks_without_gradient_beside_blocks_on_another_device",
        "distmon/collect/gradient_gain/backward_norms.py",
        "sums = _gathered([hooks.row.data for hooks in measured], into.device)",
        "sums = torch.stack([hooks.row.data for hooks in measured])",
    ),
    Mutation(
        "rows of blocks are read before they have arrived",
        "check_blocks_without_gradient_beside_blocks_on_another_device",
        "distmon/collect/gradient_gain/backward_norms.py",
        "    DeviceMark(table.device).wait()\n",
        "",
    ),
    Mutation(
        "checksums of the newest measurement, not of the one that was sent",
        "check_a_diverged_replica_is_named_by_the_step_that_showed_it",
        "distmon/runtime/observer.py",
        "self.rows.row_checksums.clone(), self.tasks.take()",
        "self.rows.row_checksums, self.tasks.take()",
        ranks=2,
    ),
    Mutation(
        "the interpreter of Triton reads device addresses on the host",
        "check_triton_is_refused_where_it_would_read_device_memory_on_the_host",
        "distmon/probe/backend.py",
        'device.type == "cuda" and os.environ.get("TRITON_INTERPRET") == "1"',
        "False",
    ),
    Mutation(
        "a DTensor is taken for the loss of this rank",
        "check_a_loss_that_is_a_dtensor",
        "distmon/layout/reported.py",
        "return value.to_local() if _is_dtensor(value) else value",
        "return value",
        ranks=2,
    ),
    Mutation(
        "a norm that is not reduced yet is taken for the total",
        "layout/test_reported.py::"
        "test_a_norm_that_is_partial_over_ranks_is_reduced_with_the_observation",
        "distmon/layout/reported.py",
        "    if not _is_dtensor(value):\n        return value, 0.0",
        "    return value, 0.0",
    ),
    Mutation(
        "a loss takes its place before it is known to be a number",
        "collect/test_losses.py::test_a_loss_that_is_no_number_leaves_the_ring_as_it_was",
        "distmon/collect/losses.py",
        "        if loss is not None:\n            loss = local_loss(loss)\n        number",
        "        self._added += 1\n        if loss is not None:\n"
        "            loss = local_loss(loss)\n        number",
    ),
    Mutation(
        "rows in float64 on a device that has none",
        "check_records_are_those_of_the_cpu",
        "distmon/device.py",
        "    except (TypeError, RuntimeError, NotImplementedError):\n        return False",
        "    except (TypeError, RuntimeError, NotImplementedError):\n        return True",
        module="no_float64_checks",
    ),
    Mutation(
        "kernels without a histogram compile in training",
        "check_nothing_compiles_after_attach",
        "distmon/probe/triton_probe.py",
        "for filled in (rows, replace(rows, bins=None)):",
        "for filled in (rows,):",
        module="launch_checks",
    ),
    Mutation(
        "kernels for gradients of another dtype compile in training",
        "check_nothing_compiles_after_attach",
        "distmon/probe/triton_probe.py",
        "            for dtypes in self._dtype_sets:\n                take_snapshot",
        "            for dtypes in self._dtype_sets[:1]:\n                take_snapshot",
        module="launch_checks",
    ),
    Mutation(
        "activations are read by the current device, not by their own",
        "check_activations_are_read_on_their_own_device",
        "distmon/collect/inside/activation_rows.py",
        "    with on_device(shaped.device):  # Triton launches on the current one\n",
        "    if True:\n",
        module="launch_checks",
    ),
    Mutation(
        "a DTensor around a tensor subclass is read as if it were plain",
        "layout/test_transformer_engine.py::test_subclasses_inside_dtensors_are_read_or_named",
        "distmon/layout/dtensor.py",
        "    inner = _inner_path(parameter)\n",
        '    inner = ""\n',
    ),
    Mutation(
        "a Triton without masked histograms is accepted",
        "probe/test_backend.py::test_an_old_triton_is_named",
        "distmon/probe/backend.py",
        "OLDEST_TRITON = (3, 4)",
        "OLDEST_TRITON = (3, 2)",
    ),
    Mutation(
        "the budget counts the time of the host only",
        "check_the_cost_has_the_time_of_the_device",
        "distmon/collect/telemetry/device_clock.py",
        "            total += seconds",
        "            total += 0.0",
    ),
    Mutation(
        "the management library is asked for what nobody records",
        "collect/telemetry/test_hardware_nvml.py::test_only_the_recorded_fields_are_asked_for",
        "distmon/collect/telemetry/hardware/nvml.py",
        "DeviceQueries(queries(nvml, listed), classify_error, fields)",
        "DeviceQueries(queries(nvml, listed), classify_error)",
    ),
    Mutation(
        "the weight inside of a tensor subclass is not found",
        "layout/test_wrapped.py::test_the_weight_inside_is_read",
        "distmon/layout/wrapped.py",
        "in (torch.Tensor, nn.Parameter)",
        "is torch.Tensor",
    ),
)


def main() -> int:
    """Try all mutations; return 1 when one was missed."""
    missed = 0
    wanted = sys.argv[1:]
    for mutation in MUTATIONS:
        if wanted and not any(part in mutation.fault for part in wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            for part in COPIED:
                shutil.copytree(ROOT / part, copy / part)
            shutil.copy(ROOT / "pyproject.toml", copy)
            outcome = _try(mutation, copy)
        missed += outcome != "caught"
        print(f"{outcome:7} {mutation.fault}  ({mutation.check})", flush=True)
    return int(missed > 0)


def _try(mutation: Mutation, copy: Path) -> str:
    path = copy / mutation.file
    text = path.read_text()
    if mutation.before not in text:
        return "STALE"
    path.write_text(text.replace(mutation.before, mutation.after))
    environment = {"PYTHONPATH": os.pathsep.join((str(copy), str(copy / "tests")))}
    if "::" in mutation.check:
        return _try_test(mutation.check, copy, environment)
    module = mutation.module or _module_of(mutation)
    if module == "launch_checks":
        environment |= driver_environment(copy)
    environment |= ENVIRONMENTS.get(module, {})
    results = run_checks(f"simulated_cuda.{module}", mutation.ranks, environment, [mutation.check])
    if not all(mutation.check in each for each in results):
        return "BROKEN"  # the check was not run
    return "caught" if any(each[mutation.check] for each in results) else "MISSED"


def _module_of(mutation: Mutation) -> str:
    for module in MODULES[mutation.ranks]:
        if mutation.check in names_of(f"simulated_cuda.{module}"):
            return module
    raise LookupError(f"there is no check {mutation.check}")


def _try_test(test: str, copy: Path, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{test}"]
    done = subprocess.run(
        command, cwd=copy, env={**os.environ, **environment}, capture_output=True, check=False
    )
    return {0: "MISSED", 1: "caught"}.get(done.returncode, "BROKEN")


if __name__ == "__main__":
    sys.exit(main())
