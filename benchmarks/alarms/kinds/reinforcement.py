"""Reinforcement learning: policy gradient, actor and critic, Q-learning with a target network."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch.nn import functional as F

from benchmarks.alarms.kinds.generative import Named, mlp
from benchmarks.alarms.kinds.setup import Batch, Loop, Setup, optimizer_of, seeded

ACTIONS = 4


def _reward(x: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    best = (x[:, :ACTIONS]).argmax(1)
    return (action == best).float() + 0.2 * x[:, 5]


def _sample(policy: torch.distributions.Categorical) -> torch.Tensor:
    """Draw actions, also where the policy is NaN."""
    with torch.no_grad():
        return torch.multinomial(policy.probs.nan_to_num(0.25), 1)[:, 0]


def policy_gradient(
    lr: float = 3e-3,
    entropy: float = 0.01,
    baseline: bool = True,
    optimizer: str = "adamw",
    seed: int = 0,
) -> Setup:
    """Choose one of four actions by REINFORCE: the loss is no measure of progress."""
    torch.manual_seed(seed)
    net = mlp(8, 32, 32, ACTIONS)
    mean = [0.0]

    def loss(x: Batch) -> torch.Tensor:
        policy = torch.distributions.Categorical(logits=net(x), validate_args=False)
        action = _sample(policy)
        reward = _reward(x, action)
        advantage = reward - (mean[0] if baseline else 0.0)
        mean[0] = 0.95 * mean[0] + 0.05 * reward.mean().item()
        value = -(policy.log_prob(action) * advantage).mean()
        return value - entropy * policy.entropy().mean()

    return Setup(
        [net],
        [optimizer_of(optimizer, net.parameters(), lr)],
        lambda step: torch.randn(64, 8, generator=seeded(seed, step)),
        loss,
    )


def actor_critic(lr: float = 2e-3, critic_lr: float = 5e-3, seed: int = 0) -> Setup:
    """Two networks with optimizers of their own, one after the other in each step."""
    torch.manual_seed(seed)
    actor, critic = Named("actor", mlp(8, 32, ACTIONS)), Named("critic", mlp(8, 32, 1))
    o_actor = optimizer_of("adamw", actor.parameters(), lr)
    o_critic = optimizer_of("adamw", critic.parameters(), critic_lr)

    def one_step(loop: Loop, step: int) -> torch.Tensor:
        x = loop.fault.data(loop.setup, step)
        policy = torch.distributions.Categorical(logits=actor(x), validate_args=False)
        action = _sample(policy)
        reward = _reward(x, action)
        loop.zero_grad(o_critic)
        value = critic(x)[:, 0]
        critic_loss = F.mse_loss(value, reward)
        loop.backward(critic_loss)
        loop.apply(o_critic)
        loop.zero_grad(o_actor)
        advantage = (reward - critic(x)[:, 0]).detach()
        actor_loss = -(policy.log_prob(action) * advantage).mean()
        loop.backward(actor_loss)
        loop.apply(o_actor)
        return actor_loss + critic_loss

    return Setup(
        [actor, critic],
        [o_actor, o_critic],
        lambda step: torch.randn(64, 8, generator=seeded(seed, step)),
        one_step=one_step,
    )


def q_learning(lr: float = 2e-3, every: int = 40, discount: float = 0.9, seed: int = 0) -> Setup:
    """Bootstrapped values: the loss rises whenever the target network is renewed."""
    torch.manual_seed(seed)
    net = mlp(8, 32, 32, ACTIONS)
    target = deepcopy(net).requires_grad_(False)

    def batch(step: int) -> Batch:
        at = seeded(seed, step)
        x = torch.randn(64, 8, generator=at)
        action = torch.randint(0, ACTIONS, (64,), generator=at)
        return x, action, 0.9 * x + 0.4 * torch.randn(64, 8, generator=at)

    def loss(given: Batch) -> torch.Tensor:
        x, action, after = given
        wanted = _reward(x, action) + discount * target(after).max(1).values
        chosen = net(x).gather(1, action[:, None])[:, 0]
        return F.smooth_l1_loss(chosen, wanted)

    def renew(step: int) -> None:
        if step % every == 0:
            target.load_state_dict(net.state_dict())

    return Setup(
        [net],
        [optimizer_of("adamw", net.parameters(), lr)],
        batch,
        loss,
        after_step=renew,
        config={"loss": {"expected_to_fall": False}},
    )
