"""`python -m benchmarks.serve_cost`: what clients of `distmon serve` cost a training next to them.

Two ranks train under the monitor while the server shows their run. Blocks of seconds without and
with clients take turns; the clients are other processes' sockets that read the events of the run.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINING = """
import sys, time, torch, distmon
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Tanh()) for _ in range(20)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
monitor = distmon.attach(model, optimizer, interval=50, run_dir=sys.argv[1] + "/run",
                         sinks=["jsonl", "arrow"], budget=None)
end, steps = time.monotonic() + float(sys.argv[2]), 0
while True:
    loss = model(torch.randn(256, 128)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss=loss)
    steps += 1
    late = torch.tensor([float(time.monotonic() > end)])
    if steps % 10 == 0:
        if dist.get_rank() == 0:
            print(steps, time.monotonic(), flush=True)
        dist.broadcast(late, 0)
        if late:
            break
monitor.close()
"""


class Client(threading.Thread):
    """Reads the view of the run and then its events, until it is stopped."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.received = 0
        self._socket = socket.create_connection(("127.0.0.1", port))
        request = "GET /api/events?run=run&after=0 HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n"
        self._socket.sendall(request.replace("\\r\\n", "\r\n").encode())

    def run(self) -> None:
        while data := self._read():
            self.received += len(data)

    def stop(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> bytes:
        try:
            return self._socket.recv(1 << 20)
        except OSError:
            return b""


def main() -> None:
    """Print steps per second with and without clients, block by block."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(TRAINING)
        whole = str(options.blocks * (options.seconds + 1) + 60)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", "2", str(script), folder, whole]
        training = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        times: list[tuple[int, float]] = []
        reader = threading.Thread(target=_read_steps, args=(training, times), daemon=True)
        reader.start()
        serve = [sys.executable, "-m", "distmon.cli.main", "serve", folder, "--port", "0"]
        server = subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r":(\d+)/", server.stdout.readline())
            assert found is not None
            while len(times) < 20:
                time.sleep(0.2)
            time.sleep(3)
            _measure(int(found[1]), times, options)
        finally:
            server.terminate()
            training.terminate()
            server.wait()
            training.wait()


def _read_steps(training: subprocess.Popen[str], times: list[tuple[int, float]]) -> None:
    assert training.stdout is not None
    for line in training.stdout:
        steps, at = line.split()
        times.append((int(steps), float(at)))


def _measure(port: int, times: list[tuple[int, float]], options: argparse.Namespace) -> None:
    rates: dict[bool, list[float]] = {False: [], True: []}
    received = 0
    for block in range(options.blocks):
        watched = block % 2 == 1
        clients = [Client(port) for _ in range(options.clients if watched else 0)]
        for client in clients:
            client.start()
        time.sleep(0.5)  # they load what has happened so far
        begin = len(times) - 1
        time.sleep(options.seconds)
        (first, start), (last, stop) = times[begin], times[-1]
        rates[watched].append((last - first) / (stop - start))
        for client in clients:
            client.stop()
            received += client.received
    for watched, found in rates.items():
        name = f"{options.clients} clients" if watched else "none"
        spread = f"{min(found):.1f} to {max(found):.1f}"
        print(f"{name:>12}: {statistics.median(found):.1f} steps/s ({spread})")
    pairs = [b / a - 1 for a, b in zip(rates[False], rates[True], strict=False)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5
    print(f"change: {100 * statistics.mean(pairs):+.2f}% +- {100 * error:.2f}% (standard error)")
    print(f"received: {received / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
