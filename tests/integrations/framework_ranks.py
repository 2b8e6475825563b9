"""Trainings by frameworks on two ranks, each with its line for distmon.

Prints, as JSON, the loss of each step averaged over the ranks, and whether FSDP2 was used.
"""

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4
SETTINGS = {"interval": 1, "sinks": ["jsonl"], "budget": None, "console": None}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.losses = []

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        loss = (self.head(inputs) - inputs.sum(1, keepdim=True).detach().sin()).square().mean()
        if self.training:
            self.losses.append(loss.detach().clone())
        return {"loss": loss}


def data():
    return TensorDataset(torch.randn(256, 8, generator=torch.Generator().manual_seed(1)))


def options(name):
    return {**SETTINGS, "run_dir": Path(sys.argv[1]) / name}


def accelerate_ddp(name):
    from accelerate import Accelerator

    import distmon.integrations.accelerate as integration

    return _accelerate_loop(Accelerator(cpu=True), lambda a: integration.attach(a, **options(name)))


def accelerate_tracker(name):
    from accelerate import Accelerator

    from distmon.integrations.accelerate import DistmonTracker

    tracker = DistmonTracker(**options(name))
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("anything", config={"lr": 0.01})
    net = _accelerate_loop(accelerator, None)
    tracker.finish()
    return net


def _accelerate_loop(accelerator, attach):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data(), 8))
    monitor = attach(accelerator) if attach else None
    for step, (x,) in enumerate(loader, 1):
        loss = model(x)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"eval_loss": 0.5 + step}, step=step)
        if step == STEPS:
            break
    if monitor is not None:
        monitor.close()
    accelerator.free_memory()
    return net


def lightning_ddp(name):
    return _lightning_fit(name, "ddp")


def lightning_fsdp2(name):
    from lightning.pytorch.strategies import ModelParallelStrategy

    return _lightning_fit(name, ModelParallelStrategy())


def _lightning_fit(name, strategy):
    import lightning

    from distmon.integrations.lightning import DistmonCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def configure_model(self):
            if name.endswith("fsdp2") and not hasattr(self, "sharded"):
                from torch.distributed.fsdp import fully_shard

                self.sharded = True
                for layer in self.net.layers:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, _):
            return self.net(batch[0])["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=sys.argv[1],
        callbacks=[DistmonCallback(**options(name))],
    )
    trainer.fit(module, DataLoader(data(), 8))
    return module.net


def transformers_ddp(name):
    from transformers import Trainer, TrainingArguments

    from distmon.integrations.transformers import DistmonCallback

    net = Net()
    arguments = TrainingArguments(
        output_dir=str(Path(sys.argv[1]) / "hf"),
        max_steps=STEPS,
        learning_rate=0.01,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    rows = [{"inputs": row} for (row,) in data()]
    callbacks = [DistmonCallback(**options(name))]
    Trainer(model=net, args=arguments, train_dataset=rows, callbacks=callbacks).train()
    return net


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {}
    for training in sys.argv[2:]:
        try:
            net = globals()[training](training)
            losses = torch.stack(net.losses[:STEPS]).double()
            dist.all_reduce(losses)
            is_sharded = any(isinstance(p, DTensor) for p in net.parameters())
            found[training] = {"losses": (losses / 2).tolist(), "is_sharded": is_sharded}
        except Exception:
            found[training] = traceback.format_exc()
    if dist.get_rank() == 0:
        print("found", json.dumps(found))
    dist.destroy_process_group()
