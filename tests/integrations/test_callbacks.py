"""Callbacks of frameworks, in trainings by the frameworks themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import quiet
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import distmon


def _records(folder: Path) -> list[dict[str, Any]]:
    return [r for r in distmon.read_run(folder / "run").records if not r.get("partial")]


class Sequences(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * (index % 5 + 1)) % 31
        return {"input_ids": tokens, "labels": tokens}


def _hf_trainer(folder: Path, callback: Any, steps: int, **arguments: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    shape = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    settings = {
        "output_dir": str(folder / "hf"),
        "max_steps": steps,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "use_cpu": True,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "include_num_input_tokens_seen": "all",
    }
    return Trainer(
        model=GPT2LMHeadModel(GPT2Config(**shape)),
        args=TrainingArguments(**{**settings, **arguments}),
        train_dataset=Sequences(),
        eval_dataset=Sequences(),
        callbacks=[callback],
    )


def test_hugging_face_trainer_with_accumulation_evaluation_and_resume(tmp_path: Path) -> None:
    from distmon.integrations.transformers import DistmonCallback

    settings = quiet(tmp_path, console=None)
    callback = DistmonCallback(**settings)
    trainer = _hf_trainer(tmp_path, callback, steps=4)
    trainer.train()
    logged = {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}
    norms = {e["step"]: e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e}
    found = _records(tmp_path)
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    for record in found:
        metrics = record["metrics"]
        # The trainer logs four decimals.
        assert metrics["train/step_loss"] == pytest.approx(logged[record["step"]], abs=1e-3)
        assert metrics["monitor/grad_norm"] == pytest.approx(norms[record["step"]], rel=1e-3)
    assert found[-1]["metrics"]["performance/tokens_per_second"] > 0
    assert found[-1]["metrics"]["performance/forward_fraction"] > 0
    assert found[2]["metrics"]["evaluation/val_loss"] > 0
    assert callback.monitor is not None
    assert callback.monitor.closed

    resumed = _hf_trainer(tmp_path, DistmonCallback(**settings), steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "hf/checkpoint-3"))
    run = distmon.read_run(tmp_path / "run")
    assert [*run.losses] == [1, 2, 3, 4, 5, 6]
    assert [a["resumed_from"] for a in run.info["attempts"]] == [0, 3]
    average = run.losses[1]
    for step in range(2, 7):
        average = 0.99 * average + 0.01 * run.losses[step]
    assert run.loss_ema[6] == pytest.approx(average, rel=1e-9), "continued from the checkpoint"


def _lightning_fit(folder: Path, callback: Any, steps: int, resume: str | None = None) -> Any:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in "ab"))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self.layers(batch[0]).square().mean()
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", self.layers(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=4,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        callbacks=[callback],
    )
    trainer.fit(Module(), DataLoader(data, 4), DataLoader(data, 32), ckpt_path=resume)
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer_with_accumulation_validation_and_resume(tmp_path: Path) -> None:
    from distmon.integrations.lightning import DistmonCallback

    callback = DistmonCallback(**quiet(tmp_path))
    trainer = _lightning_fit(tmp_path, callback, steps=4)
    found = _records(tmp_path)
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    assert all(record["applied"] for record in found)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in "ab"))
    first = [layers(inputs[i : i + 4]).square().mean().item() for i in (0, 4)]
    assert found[0]["metrics"]["train/step_loss"] == pytest.approx(sum(first) / 2, rel=1e-6)
    assert found[2]["metrics"]["evaluation/val_loss"] > 0
    assert found[-1]["metrics"]["performance/forward_fraction"] > 0
    assert found[-1]["metrics"]["gradient_monitor/mean_gain"] > 0
    trainer.save_checkpoint(tmp_path / "last.ckpt")

    again = DistmonCallback(**quiet(tmp_path))
    _lightning_fit(tmp_path, again, steps=6, resume=str(tmp_path / "last.ckpt"))
    run = distmon.read_run(tmp_path / "run")
    assert [a["resumed_from"] for a in run.info["attempts"]] == [0, 4]
    average = run.losses[1]
    for step in range(2, 7):
        average = 0.99 * average + 0.01 * run.losses[step]
    assert run.loss_ema[6] == pytest.approx(average, rel=1e-9), "continued from the checkpoint"


def test_a_rule_that_stops_ends_the_training_of_the_framework(tmp_path: Path) -> None:
    from distmon.integrations.transformers import DistmonCallback

    rules = {"always": {"when": "step_loss > 0", "severity": "critical"}}
    settings = quiet(tmp_path, rules=rules, actions={"stop": ["always"]})
    trainer = _hf_trainer(tmp_path, DistmonCallback(**settings), steps=50, save_strategy="no")
    trainer.train()
    assert trainer.state.global_step < 50  # nobody waits for the evaluation


def test_accelerate_needs_to_know_which_model(tmp_path: Path) -> None:
    from accelerate import Accelerator

    import distmon.integrations.accelerate as integration

    accelerator = Accelerator(cpu=True)
    with pytest.raises(distmon.DistmonError, match="prepared 0 models and 0 optimizers"):
        integration.attach(accelerator)
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    one, two, optimizer = accelerator.prepare(one, two, optimizer)
    monitor = integration.attach(accelerator, one, optimizer, **quiet(tmp_path))
    for _ in range(2):
        accelerator.backward(one(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    assert [record["step"] for record in _records(tmp_path)] == [1, 2]
