"""A small classifier trained by Lightning.

python examples/lightning_trainer.py
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distmon.integrations.lightning import DistmonCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
        self.layers = nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4))

    def loss(self, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def training_step(self, batch, _):
        return self.loss(batch)

    def validation_step(self, batch, _):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
inputs = torch.randn(2048, 16)
data = TensorDataset(inputs, inputs[:, :4].argmax(1))
model = Classifier()
trainer = lightning.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=1,
    max_steps=args.steps,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    val_check_interval=40,
    limit_val_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[DistmonCallback(interval=20)],
)
trainer.fit(model, DataLoader(data, 16, shuffle=True), DataLoader(data, 64))
print(f"final {sum(p.double().sum() for p in model.parameters()).item().hex()}")
