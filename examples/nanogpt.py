"""A small GPT trained in the style of nanoGPT. Knows nothing of distmon.

distmon run examples/nanogpt.py
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()
torch.manual_seed(1337)
block_size, width, heads, accumulation = 32, 64, 4, 2
data = torch.tensor(list(Path(__file__).read_bytes()))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))

    def forward(self, x):
        y = self.ln_1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def get_batch():
    starts = torch.randint(len(data) - block_size - 1, (8,))
    windows = torch.stack([data[i : i + block_size + 1] for i in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def estimate_loss():
    model.eval()
    loss = sum(model(*get_batch()).item() for _ in range(4)) / 4
    model.train()
    return loss


model = GPT()
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}], lr=3e-3)
optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
for step in range(args.steps):
    if step % 20 == 0:
        print(f"step {step} val loss {estimate_loss():.4f}")
    for _ in range(accumulation):
        loss = model(*get_batch()) / accumulation
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
print(f"final {sum(p.double().sum() for p in model.parameters()).item().hex()}")
