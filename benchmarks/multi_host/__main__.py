"""`python -m benchmarks.multi_host --hosts 2`: scenarios with and without the monitor."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.multi_host.hosts import TRAINING, Hosts


@dataclass(frozen=True)
class Scenario:
    """What is different from a good network and good hosts."""

    name: str
    steps: int = 60
    delay_ms: float = 0
    loss: float = 0
    cut_after_s: float = 0
    cut_s: float = 0
    """How long; infinite for good."""
    host_environ: dict[int, dict[str, str]] = field(default_factory=dict)
    restarts: int = 0


SCENARIOS = (
    Scenario("good network"),
    Scenario("20 ms delay each way", steps=20, delay_ms=20),
    Scenario("1% of frames lost", steps=20, loss=0.01),
    Scenario("cut for 3 s", steps=400, cut_after_s=4, cut_s=3),
    Scenario(
        "cut for good",
        steps=2000,
        cut_after_s=6,
        cut_s=float("inf"),
        host_environ={host: {"HOSTS_TIMEOUT_S": "10"} for host in range(8)},
    ),
    Scenario("clock of host 1 an hour ahead", host_environ={1: {"HOSTS_SKEW_S": "3600"}}),
    Scenario("clock of host 0 a day back", host_environ={0: {"HOSTS_SKEW_S": "-86400"}}),
    Scenario("host 1 slow in forward", host_environ={1: {"HOSTS_SLOW_S": "0.06"}}),
    Scenario(
        "a rank dies, torchrun restarts all",
        steps=60,
        restarts=1,
        host_environ={1: {"HOSTS_DIES_AT": "22"}},
    ),
)


def main() -> int:
    """Run the chosen scenarios; exit code 1 when losses differ or a step is held up by 5 s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--scenario", default="*", help="glob of names")
    given = parser.parse_args()
    print(
        "| scenario | losses identical | longest step without / with the monitor "
        "| records | alerts that name a host | error without / with |\n|---|---|---|---:|---|---|"
    )
    harmed = False
    for scenario in SCENARIOS:
        if not fnmatch(scenario.name, given.scenario):
            continue
        bare = run(scenario, given.hosts, False)
        monitored = run(scenario, given.hosts, True)
        ends = "inf" in str(scenario.cut_s)
        same = [_common(a, b) for a, b in zip(bare["ranks"], monitored["ranks"], strict=True)]
        harmed |= not all(same) or monitored["longest_s"] > bare["longest_s"] + 5
        harmed |= not ends and bool(monitored["error"]) and not bare["error"]
        harmed |= not monitored["records"].isdecimal()
        print(
            f"| {scenario.name}, {given.hosts} hosts | {'yes' if all(same) else 'NO'} "
            f"| {bare['longest_s']:.2f} s / {monitored['longest_s']:.2f} s "
            f"| {monitored['records']} | {monitored['alerts'] or '-'} "
            f"| {bare['error'][:60] or '-'} / {monitored['error'][:60] or '-'} |",
            flush=True,
        )
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    return int(harmed)


def run(scenario: Scenario, count: int, monitored: bool) -> dict[str, Any]:
    """Run one scenario once, and return what ranks and folder say."""
    with tempfile.TemporaryDirectory(prefix="distmon-hosts-") as name:
        folder = Path(name)
        with Hosts(count, folder, scenario.delay_ms, scenario.loss) as hosts:
            processes = [
                hosts.start(host, *_command(scenario, hosts, host, folder, monitored))
                for host in range(count)
            ]
            if scenario.cut_after_s:
                _wait_for_training(folder, processes)
                time.sleep(scenario.cut_after_s)
                hosts.cut(True)
                if scenario.cut_s < 1e6:
                    time.sleep(scenario.cut_s)
                    hosts.cut(False)
            output = []
            for process in processes:
                try:
                    output.append(process.communicate(timeout=240)[0])
                except Exception:
                    process.kill()
                    output.append(process.communicate()[0])
        return _results(folder, count, output)


def _wait_for_training(folder: Path, processes: list[Any]) -> None:
    limit = time.monotonic() + 120
    while not (folder / "checkpoint.pt").exists() and time.monotonic() < limit:
        if any(process.poll() is not None for process in processes):
            return
        time.sleep(0.1)


def _command(
    scenario: Scenario, hosts: Hosts, host: int, folder: Path, monitored: bool
) -> tuple[list[str], dict[str, str]]:
    environ = {
        "HOSTS_FOLDER": str(folder),
        "HOSTS_STEPS": str(scenario.steps),
        "HOSTS_MONITORED": str(int(monitored)),
        "OMP_NUM_THREADS": "1",
        **scenario.host_environ.get(host, {}),
    }
    address = hosts.address(0)
    if scenario.restarts:
        launcher = ["-m", "torch.distributed.run", f"--nnodes={hosts.count}", "--nproc-per-node=1"]
        launcher += [f"--node-rank={host}", f"--max-restarts={scenario.restarts}"]
        launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:29617", "--rdzv-id=job"]
        # Else a rank may find the address of a process that has died in torchrun's store.
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return [*launcher, f"--local-addr={hosts.address(host)}", str(TRAINING)], environ
    environ |= {"RANK": str(host), "WORLD_SIZE": str(hosts.count)}
    environ |= {"MASTER_ADDR": address, "MASTER_PORT": "29618"}
    return [str(TRAINING)], environ


def _results(folder: Path, count: int, output: list[str]) -> dict[str, Any]:
    from distmon.errors import DistmonError
    from distmon.runs.reader import read_run

    ranks = []
    for rank in range(count):
        losses: dict[str, float] = {}
        found: dict[str, Any] = {"longest_s": 0.0, "error": ""}
        for file in (folder / f"rank{rank}.json", folder / f"rank{rank}.restarted.json"):
            if file.exists():
                found = json.loads(file.read_text())
                losses |= found["losses"]
        ranks.append({**found, "losses": losses})
    silent = [text[-300:] for rank, text in zip(ranks, output, strict=True) if not rank["losses"]]
    records, alerts = "-", ""
    try:
        run = read_run(folder / "run")
        records = str(len(run.records))
        named = [a for a in run.alerts if "host" in a["message"] and a["severity"] != "info"]
        alerts = "; ".join(sorted({f"{a['rule']} of {_host(a['message'])}" for a in named}))
    except DistmonError as error:
        if (folder / "run").exists():  # without the monitor there is none
            records = f"unreadable: {error}"
    return {
        "ranks": [rank["losses"] for rank in ranks],
        "longest_s": max(rank["longest_s"] for rank in ranks),
        "error": next((rank["error"] for rank in ranks if rank["error"]), "") or "".join(silent),
        "records": records,
        "alerts": alerts,
    }


def _host(message: str) -> str:
    at = message.find("host")
    return message[at : at + 5]


def _common(first: dict[str, float], other: dict[str, float]) -> bool:
    """Return whether both ranks took some steps, and those that both took have equal losses."""
    common = first.keys() & other.keys()
    return bool(common) and all(other[step] == first[step] for step in common)


if __name__ == "__main__":
    sys.exit(main())
