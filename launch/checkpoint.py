"""Checkpoints on disk: written atomically, checked before they are used."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from launch.model import Shape
from launch.options import Options
from launch.ranks import BadInput

FORMAT = 2  # 1 had the rows of attn.qkv in another order and an optimizer state without names


@dataclass
class Checkpoints:
    """The checkpoint folder of one run. Only rank 0 saves.

    A checkpoint holds whole weights and optimizer state by parameter name, so that any parallelism
    on any number of ranks can resume from it.
    """

    folder: Path
    keep: int
    """How many older checkpoints of this run stay besides the latest."""
    written: list[Path] = field(default_factory=list)

    def open(self) -> None:
        """Make the folder, so that one that cannot be written is known before the first step."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            reason = f"cannot write checkpoints to {self.folder}: {error.strerror}"
            raise BadInput(reason) from None

    def save(self, step: int, content: dict[str, Any]) -> Path:
        """Write the state after `step` steps and remove what is no longer kept.

        Files of earlier runs in the same folder are never removed.
        """
        path = self.folder / f"step-{step:06d}.pt"
        partial = path.with_suffix(f".partial-{os.getpid()}")
        try:
            with partial.open("wb") as file:
                torch.save({**content, "step": step, "format": FORMAT}, file)
                file.flush()
                os.fsync(file.fileno())
            # A reader, or a crash, sees the old file or the new one and never half of it.
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise BadInput(f"cannot write the checkpoint {path}: {error.strerror}") from None
        self.written = [*(old for old in self.written if old != path), path]
        while len(self.written) > self.keep + 1:
            self.written.pop(0).unlink(missing_ok=True)
        return path

    def load(self, options: Options) -> dict[str, Any]:
        """Return the checkpoint of `--resume`, checked to be one that these options can continue.

        No random state is in it because none is used: batches follow from the step alone, and the
        model has no dropout.
        """
        path = self.find(options.resume)
        saved = read_checkpoint(path, options.shape, options.optimizer)
        step = saved["step"]
        if step >= options.steps:
            raise BadInput(f"{path} is at step {step} already; give --steps a larger number")
        return saved

    def find(self, resume: str) -> Path:
        """Return the file that `--resume PATH` or `--resume latest` means.

        The latest is the one written last, not the one with the most steps: an earlier, longer run
        may have used the same folder.
        """
        if resume != "latest":
            if not Path(resume).is_file():
                raise BadInput(f"there is no checkpoint {resume} to resume from")
            return Path(resume)
        found = [*self.folder.glob("step-*.pt")]
        if not found:
            raise BadInput(f"--resume latest found no checkpoint in {self.folder}")
        return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def read_checkpoint(path: Path, shape: Shape, algorithm: str = "adamw") -> dict[str, Any]:
    """Load a checkpoint to the CPU and check that it is of this model and this optimizer."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        # A broken file fails in many ways (zip, pickle, end of file), which all mean the same.
        raise BadInput(f"{path} is damaged or is not a checkpoint of this trainer") from None
    if not isinstance(content, dict) or not {"model", "optimizer", "step", "shape"} <= set(content):
        raise BadInput(f"{path} is not a checkpoint of this trainer")
    if content.get("format") != FORMAT:
        raise BadInput(f"{path} was written by another version of this trainer, which differs")
    # An older checkpoint lacks the fields of the shape that were not yet a choice.
    here, there = asdict(shape), {**asdict(Shape()), **content["shape"]}
    differences = [
        f"{key} {there[key]} there, {here[key]} here" for key in here if there[key] != here[key]
    ]
    if differences:
        raise BadInput(f"{path} is of another model: {', '.join(differences)}")
    trained_with = content.get("algorithm", "adamw")
    if trained_with != algorithm:
        raise BadInput(f"{path} was trained with --optimizer {trained_with}, not {algorithm}")
    return content
