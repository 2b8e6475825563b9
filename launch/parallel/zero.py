"""`--parallel deepspeed`: a DeepSpeed engine, which owns the optimizer and clips by itself."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from launch.faults import FAULTS
from launch.model import GPT, cross_entropy
from launch.options import Options
from launch.parallel.base import Parallelism, Sizes, blank_state
from launch.ranks import BadInput, Ranks

STAGE = 2  # unless --zero says otherwise
CONFIGS = Path(__file__).parents[1]  # where ds_zero*.json are
FLAT_MASTERS = "single_partition_of_fp32_groups"  # of stages 1 and 2
SET_HERE = ("optimizer", "distmon", "train_micro_batch_size_per_gpu")


class Zero(Parallelism):
    """ZeRO: optimizer state (stage 1), gradients (2) and weights (3) are sharded.

    `module` is the engine, which steps the masters of its own in `optimizer`.
    """

    reports_steps = True

    def __init__(self, model: GPT, options: Options, ranks: Ranks, device: torch.device) -> None:
        super().__init__(model, options, ranks, device)
        import deepspeed

        if device.type == "cpu":
            # DeepSpeed would compile its own collectives for minutes; gloo has them.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._stage = STAGE if options.zero is None else options.zero
        config = {
            **read_config(self._stage),
            "train_batch_size": options.batch_size,
            "gradient_accumulation_steps": self.sizes.micro_batches,
            "gradient_clipping": options.clip,
            "torch_autocast": {"enabled": options.bf16, "dtype": "bfloat16"},
        }
        self.module, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=config
        )

    @classmethod
    def divide(cls, options: Options, world: int) -> Sizes:
        if options.inject and FAULTS[options.inject].in_parameter:
            raise BadInput(
                f"--inject {options.inject} does not work with --parallel deepspeed, whose engine "
                "gives no access to its gradients; spike does"
            )
        if importlib.util.find_spec("deepspeed") is None:
            raise BadInput("--parallel deepspeed needs pip install 'distmon[deepspeed]'")
        return Sizes(shards=world, micro_batches=options.accumulate)

    def wrap(self, model: GPT) -> nn.Module:
        return model  # the engine needs the optimizer, which is built from what this returns

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:
        self.module.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return nothing: the engine has its own."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.module.backward(loss, scale_wrt_gas=False)

    def gradient_norm(self) -> None:
        """Return None: the engine computes the norm when it steps."""

    def optimizer_step(self, norm: None) -> None:  # noqa: ARG002
        """Clip and update, both by the engine."""
        self.module.step()

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        return cross_entropy(self.module(inputs), targets)

    def full_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self._stage:
            return super().full_state()
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self.link_states()
        # The engine's optimizer steps flat masters of many parameters, all in the same state.
        of_master = next(iter(self.optimizer.state.values()))
        weights = {
            name: safe_get_full_fp32_param(parameter).cpu()
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }
        states = {
            name: {
                key: safe_get_full_optimizer_state(each, key).cpu() if value.ndim else value.clone()
                for key, value in of_master.items()
            }
            for name, each in self.parameters.items()
        }
        return (weights, states) if self.ranks.is_main else ({}, {})

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        if not self._stage:
            super().load_optimizer_state(state)
            return
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        wrapper, world, rank = self.module.optimizer, self.ranks.world, self.ranks.rank
        like = next(iter(state.values()))
        masters = "fp32_partitioned_groups_flat" if self._stage == 3 else FLAT_MASTERS
        for master in getattr(wrapper, masters):
            self.optimizer.state[master] = blank_state(like, master)
        self.link_states()
        for name, key in ((name, key) for name in state for key in like if like[key].ndim):
            parameter, value = self.parameters[name], state[name][key].to(self.device)
            if self._stage < 3:
                safe_set_full_optimizer_state(parameter, value, key)
                continue
            # DeepSpeed's setter of full states fails where the last shard is padded.
            size = parameter.ds_tensor.numel()
            padded = F.pad(value.flatten(), (0, size * world - value.numel()))
            safe_set_local_optimizer_state(parameter, padded[rank * size :][:size], key)

    def link_states(self) -> None:
        """Link parameters to their optimizer state, which DeepSpeed does for the first group only.

        It links all groups when the first has stepped and the others have no state yet.
        """
        if self._stage < 3:
            from deepspeed.utils import lazy_init_hp_params_optimizer_state

            wrapper = self.module.optimizer
            masters = getattr(wrapper, FLAT_MASTERS)
            for parameters, master in zip(wrapper.bit16_groups, masters, strict=True):
                lazy_init_hp_params_optimizer_state(parameters, master, wrapper.optimizer.state)

    def close(self) -> None:
        if self.module is not self.model:
            self.module.destroy()


def read_config(stage: int) -> dict[str, Any]:
    """Return the example configuration of a stage without what the trainer sets in another way."""
    if not stage:
        return {"zero_optimization": {"stage": 0}, "steps_per_print": 10**9}
    config = json.loads((CONFIGS / f"ds_zero{stage}.json").read_text())
    return {key: value for key, value in config.items() if key not in SET_HERE}
