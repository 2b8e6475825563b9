"""GPT-2 with random weights, trained by the Trainer of Hugging Face.

python examples/huggingface_trainer.py
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from distmon.integrations.transformers import DistmonCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--output", default="runs/huggingface")
args = parser.parse_args()


class Squares(torch.utils.data.Dataset):
    """Numbered sequences that can be learned."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        tokens = (torch.arange(24) * (index % 7 + 1)) % 61
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=48, n_layer=3, n_head=4))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Squares(4096),
    eval_dataset=Squares(64),
    callbacks=[DistmonCallback(interval=20)],
)
trainer.train()
if trainer.is_world_process_zero():
    print(f"final {sum(p.double().sum() for p in model.parameters()).item().hex()}")
