"""A GAN on a ring of points: two models and two optimizers. Knows nothing of distmon.

distmon run examples/gan.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()
torch.manual_seed(0)


def mlp(inputs, outputs):
    hidden = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


def real_points(count):
    angle = torch.rand(count) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1)


generator, discriminator = mlp(8, 2), mlp(2, 1)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

for step in range(args.steps):
    fake = generator(torch.randn(64, 8))
    discriminator_optimizer.zero_grad()
    real_loss = F.binary_cross_entropy_with_logits(discriminator(real_points(64)), ones)
    fake_loss = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
    (real_loss + fake_loss).backward()
    discriminator_optimizer.step()

    generator_optimizer.zero_grad()
    generator_loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
    generator_loss.backward()
    generator_optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1} D {real_loss + fake_loss:.4f} G {generator_loss:.4f}")
both = [*generator.parameters(), *discriminator.parameters()]
print(f"final {sum(p.double().sum() for p in both).item().hex()}")
