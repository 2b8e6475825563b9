"""A loop with Hugging Face accelerate, on one process or several.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distmon.integrations.accelerate

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 48), *(Layer(48) for _ in range(3)), nn.Linear(48, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
inputs = torch.randn(4096, 16)
loader = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=16)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
monitor = distmon.integrations.accelerate.attach(accelerator, interval=20)

step = 0
for x, labels in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), labels)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    step += accelerator.sync_gradients
    if step == args.steps:
        break
monitor.close()  # distmon
if accelerator.is_main_process:
    print(f"final {sum(p.double().sum() for p in model.parameters()).item().hex()}")
accelerator.end_training()
