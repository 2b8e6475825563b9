"""DeepSpeed ZeRO-2 in bf16. Knows nothing of distmon; its config needs no block.

distmon run --nproc-per-node 2 examples/deepspeed_zero.py
"""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()
if not torch.cuda.is_available():  # without the minutes that building an operator takes
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


def main():
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), *(Layer(48) for _ in range(3)), nn.Linear(48, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    random = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(2 * args.steps):
        inputs = torch.randn(8, 16, generator=random)
        labels = inputs[:, :4].argmax(1).to(engine.device)
        logits = engine(inputs.to(engine.device, torch.bfloat16))
        loss = nn.functional.cross_entropy(logits.float(), labels)
        engine.backward(loss)
        engine.step()
    if torch.distributed.get_rank() == 0:
        total = sum(p.double().sum() for p in engine.module.parameters())
        print(f"final {total.item().hex()}", flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
