"""Masters on the host in a job whose process group serves the accelerator alone."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import torch
import torch.distributed as dist
from distmon.reduce.process_group import Ranks

# As nccl would be: nothing on the host can be sent through it.
dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks = Ranks(10.0, torch.device("cpu"))
print(ranks.gather(torch.tensor([3])).tolist())
ranks.close()
dist.destroy_process_group()
"""


def test_ranks_talk_through_gloo() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[[3]]", done.stderr
