"""A Hugging Face Trainer with a DeepSpeed config. Knows nothing of distmon."""

import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config, output, log = sys.argv[1:]
arguments = TrainingArguments(
    output_dir=output,
    max_steps=4,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    optim="adamw_torch",
    logging_steps=1,
    deepspeed=config,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
torch.manual_seed(0)
sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(
    GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0)
)
generator = torch.Generator().manual_seed(0)
rows = [torch.randint(0, 50, (16,), generator=generator) for _ in range(64)]
trainer = Trainer(
    model=model, args=arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows]
)
trainer.train()
if trainer.is_world_process_zero():
    with open(log, "w") as file:
        json.dump(trainer.state.log_history, file)
