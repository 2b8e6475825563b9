"""Reinforcement learning in a small world: clipped policies, replayed values, soft actor-critic."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.alarms.blind.plain import plain
from benchmarks.alarms.kinds.generative import Named, mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Setup, seeded

MOVES = torch.tensor([[0.4, 0.0], [-0.4, 0.0], [0.0, 0.4], [0.0, -0.4]])


def world(state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move on a plane; the reward is to be near the origin."""
    after = (state + MOVES[action]).clamp(-2, 2)
    return after, -after.norm(dim=1)


class ActorCritic(nn.Module):
    """A policy and a value on one trunk."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.trunk = mlp(2, width, width, activation=nn.Tanh)
        self.policy, self.value = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and value."""
        z = self.trunk(x).tanh()
        return self.policy(z), self.value(z)[:, 0]


def clipped_policy(seed: int = 0, epochs: int = 4, entropy: float = 0.01, **training: Any) -> Setup:
    """PPO: each batch of experience is used for several steps."""
    torch.manual_seed(seed)
    net = ActorCritic()
    kept: list[Any] = [-1, None]

    @torch.no_grad()
    def experience(number: int) -> Batch:
        at = seeded(seed, number, 17)
        x = 4 * torch.rand(64, 2, generator=at) - 2
        states, actions, logs, rewards = [], [], [], []
        for _ in range(5):
            logits, _ = net(x)
            action = torch.multinomial(logits.softmax(-1).nan_to_num(0.25), 1)[:, 0]
            states.append(x)
            actions.append(action)
            logs.append(logits.log_softmax(-1).gather(1, action[:, None])[:, 0])
            x, reward = world(x, action)
            rewards.append(reward)
        left, returns = net(x)[1], []
        for reward in reversed(rewards):
            left = reward + 0.9 * left
            returns.insert(0, left)
        parts = [torch.cat(each) for each in (states, actions, logs, returns)]
        gain = parts[3] - net(parts[0])[1]
        return (*parts, (gain - gain.mean()) / (gain.std() + 1e-6))

    def batch(step: int) -> Batch:
        if kept[0] != step // epochs:
            kept[:] = [step // epochs, experience(step // epochs)]
        some = torch.randperm(320, generator=seeded(seed, step, 18))[:160]
        return tuple(part[some] for part in kept[1])

    def loss(given: Batch) -> torch.Tensor:
        x, action, old, returns, gain = given
        logits, value = net(x)
        every = logits.log_softmax(-1)
        ratio = (every.gather(1, action[:, None])[:, 0] - old).exp()
        policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        spread = -(every.exp() * every).sum(-1).mean()
        return policy + 0.5 * F.mse_loss(value, returns) - entropy * spread

    return plain(net, batch, loss, **{"clip": 0.5, **training})


def replayed_values(seed: int = 0, tau: float = 0.02, **training: Any) -> Setup:
    """DQN with a replay buffer that fills during the run, and a slow target."""
    torch.manual_seed(seed)
    net = mlp(2, 32, 32, 4)
    target = deepcopy(net).requires_grad_(False)
    buffer: list[Batch] = []

    @torch.no_grad()
    def collect(step: int) -> None:
        at = seeded(seed, step, 19)
        x = 4 * torch.rand(32, 2, generator=at) - 2
        action = net(x).argmax(1)
        explore = torch.rand(32, generator=at) < max(0.1, 1 - step / 150)
        action = torch.where(explore, torch.randint(0, 4, (32,), generator=at), action)
        buffer.append((x, action, *world(x, action)))

    def batch(step: int) -> Batch:
        collect(step)
        at = seeded(seed, step, 20)
        some = [int(torch.randint(0, len(buffer), (), generator=at)) for _ in range(4)]
        return tuple(torch.cat([buffer[i][k] for i in some]) for k in range(4))

    def loss(given: Batch) -> torch.Tensor:
        x, action, after, reward = given
        wanted = reward + 0.9 * target(after).max(1).values
        return F.smooth_l1_loss(net(x).gather(1, action[:, None])[:, 0], wanted)

    @torch.no_grad()
    def follow(_: int) -> None:
        for ours, theirs in zip(net.parameters(), target.parameters(), strict=True):
            theirs.lerp_(ours, tau)

    return plain(net, batch, loss, after_step=follow, **{"lr": 1e-3, **training})


def soft_actor(seed: int = 0, lr: float = 2e-3, share: float = 0.05) -> Setup:
    """Soft actor-critic: critic, actor and temperature with an optimizer each."""
    torch.manual_seed(seed)
    actor, critic = Named("actor", mlp(2, 32, 4)), Named("critic", mlp(2, 32, 32, 4))
    heat = Named("heat", nn.Linear(1, 1))
    target = deepcopy(critic).requires_grad_(False)
    optimizers = [torch.optim.Adam(m.parameters(), lr) for m in (critic, actor, heat)]

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x = loop.fault.data(loop.setup, step)
        action = torch.randint(0, 4, (len(x),), generator=seeded(seed, step, 21))
        after, reward = world(x, action)
        scale = heat(torch.ones(1, 1)).exp()[0, 0].clamp(0.01, 2)
        with torch.no_grad():
            chance = actor(after).softmax(-1)
            soft = target(after) - scale * chance.clamp_min(1e-8).log()
            wanted = reward + 0.9 * (chance * soft).sum(1)
        losses = []
        for optimizer, name in zip(optimizers, ("critic", "actor", "heat"), strict=True):
            loop.zero_grad(optimizer)
            if name == "critic":
                loss = F.mse_loss(critic(x).gather(1, action[:, None])[:, 0], wanted)
            else:
                chance = actor(x).softmax(-1)
                logs = chance.clamp_min(1e-8).log()
                if name == "actor":
                    loss = (chance * (scale.detach() * logs - critic(x).detach())).sum(1).mean()
                else:
                    spread = -(chance * logs).sum(1).mean().detach()
                    loss = heat(torch.ones(1, 1)).exp()[0, 0] * (spread - 0.6)
            loop.backward(loss)
            loop.apply(optimizer)
            losses.append(loss.detach())
        with torch.no_grad():
            for ours, theirs in zip(critic.parameters(), target.parameters(), strict=True):
                theirs.lerp_(ours, share)
        return losses[0] + losses[1]

    return Setup(
        [critic, actor, heat],
        optimizers,
        lambda step: 4 * torch.rand(64, 2, generator=seeded(seed, step, 22)) - 2,
        one_step=one_step,
        clip=None,
    )


def imitation(seed: int = 0, noise: float = 0.2, **training: Any) -> Setup:
    """Behavior cloning of a noisy expert."""
    torch.manual_seed(seed)
    net = mlp(2, 32, 32, 4, activation=nn.ReLU)

    def batch(step: int) -> Batch:
        at = seeded(seed, step, 23)
        x = 4 * torch.rand(64, 2, generator=at) - 2
        best = torch.stack([world(x, torch.full((64,), i))[1] for i in range(4)], 1).argmax(1)
        odd = torch.rand(64, generator=at) < noise
        return x, torch.where(odd, torch.randint(0, 4, (64,), generator=at), best)

    return plain(net, batch, lambda given: F.cross_entropy(net(given[0]), given[1]), **training)
