"""LoRA adapters on a frozen model, with an averaged copy that is saved. Knows nothing of distmon.

distmon run examples/lora.py
"""

import argparse
import copy
import io

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()
torch.manual_seed(0)


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), LoRALinear(nn.Linear(width, width))

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


model = nn.Sequential(*(Layer(64) for _ in range(3)), nn.Linear(64, 8).requires_grad_(False))
for name, parameter in model.named_parameters():
    parameter.requires_grad_("down" in name or "up" in name)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
average = copy.deepcopy(model)

for step in range(args.steps):
    x = torch.randn(32, 64)
    loss = (model(x) - x[:, :8].roll(1, 1)).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    if step % 20 == 19:
        print(f"step {step + 1} loss {loss.item():.4f}")
        average = copy.deepcopy(average)
file = io.BytesIO()
torch.save(model, file)
file.seek(0)
loaded = torch.load(file, weights_only=False)
print(f"final {sum(p.double().sum() for p in loaded.parameters()).item().hex()}")
