"""The modes of `--parallel`: how each divides the ranks, and what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bad_input import BadInput
from burdens import BURDENS

if TYPE_CHECKING:
    from options import Options

MODES = ("ddp", "fsdp", "fsdp1", "hsdp", "tp", "fsdp+tp", "pp", "deepspeed")
ZERO = 2  # stage of deepspeed, unless --zero says otherwise
REPLICAS = 2  # of hsdp, which shards over the other ranks
TENSOR_PARALLEL = 2  # of fsdp+tp, unless --tensor-parallel says otherwise


@dataclass(frozen=True)
class Division:
    """How many ranks share what. The product of the four sizes is the number of ranks."""

    mode: str
    replicas: int = 1
    """Copies of the model that see different data."""
    shards: int = 1
    """Pieces of every parameter whose holders see different data."""
    tensor: int = 1
    """Pieces of every layer's work whose holders see the same data."""
    stages: int = 1
    """Consecutive parts of the model."""
    micro_batches: int = 1
    """How often a step goes forward and backward."""
    zero: int = 0
    """Stage of deepspeed: what is cut of optimizer (1), gradients (2) and weights (3)."""

    @property
    def data(self) -> int:
        """The parts that a batch is cut into."""
        return self.replicas * self.shards

    def data_rank(self, rank: int) -> int:
        """Which part of the batch a rank works on."""
        return rank // (self.tensor * self.stages)


def divide(options: Options, world: int) -> Division:
    """The division that `--parallel` means on `world` ranks, or what stands in its way."""
    mode, micro_batches = options.parallel, options.accumulate
    if options.tensor_parallel is not None and mode != "fsdp+tp":
        raise BadInput(
            f"--tensor-parallel is for --parallel fsdp+tp, not {mode}"
            + ", which uses all ranks" * (mode == "tp")
        )
    if options.zero is not None and mode != "deepspeed":
        raise BadInput(f"--zero is for --parallel deepspeed, not {mode}")
    if mode != "ddp" and world < 2:
        raise BadInput(f"--parallel {mode} needs at least 2 ranks; start with torchrun")
    if mode == "ddp":
        division = Division(mode, replicas=world, micro_batches=micro_batches)
    elif mode in ("fsdp", "fsdp1"):
        division = Division(mode, shards=world, micro_batches=micro_batches)
    elif mode == "deepspeed":
        stage = ZERO if options.zero is None else int(options.zero)
        division = Division(mode, shards=world, micro_batches=micro_batches, zero=stage)
    elif mode == "hsdp":
        if world < 2 * REPLICAS or world % REPLICAS:
            raise BadInput(
                f"--parallel hsdp makes {REPLICAS} replicas of at least 2 shards each and needs "
                f"an even number of ranks from {2 * REPLICAS} on, not {world}"
            )
        division = Division(mode, REPLICAS, world // REPLICAS, micro_batches=micro_batches)
    elif mode == "tp":
        division = Division(mode, tensor=world, micro_batches=micro_batches)
    elif mode == "fsdp+tp":
        tensor = options.tensor_parallel or TENSOR_PARALLEL
        if world < 2 * tensor or world % tensor:
            raise BadInput(
                f"--parallel fsdp+tp with --tensor-parallel {tensor} needs a multiple of {tensor} "
                f"ranks from {2 * tensor} on, not {world}"
            )
        shards = world // tensor
        division = Division(mode, shards=shards, tensor=tensor, micro_batches=micro_batches)
    else:
        # With fewer micro-batches than stages some stages would never have anything to do.
        division = Division(mode, stages=world, micro_batches=max(micro_batches, world))
    _check_model(options, division)
    _check_batch(options, division)
    return division


def _check_model(options: Options, division: Division) -> None:
    """Whether the model can be cut as the division says."""
    mode, tensor, stages = division.mode, division.tensor, division.stages
    for flag, size in (("heads", options.heads), ("context", options.context)):
        if size % tensor:
            raise BadInput(
                f"--{flag} {size} must be divisible by {tensor}, the ranks that share a layer "
                f"under --parallel {mode}"
            )
    if stages > options.layers:
        raise BadInput(
            f"--parallel pp needs a block for each of its {stages} stages and "
            f"--layers is {options.layers}"
        )
    if stages > 1 and options.tied:
        raise BadInput(
            "--tied does not work with --parallel pp: embedding and head are on different ranks"
        )
    if mode == "deepspeed" and options.inject not in (None, "spike", *BURDENS):
        raise BadInput(
            f"--inject {options.inject} does not work with --parallel deepspeed, whose engine "
            "lets nobody at its gradients; spike does"
        )
    if options.compile and mode == "deepspeed":
        raise BadInput("--compile does not work with --parallel deepspeed")
    if options.bf16_weights and mode == "deepspeed":
        raise BadInput(
            "--bf16-weights does not work with --parallel deepspeed, whose engine keeps float32 "
            "copies of the weights"
        )
    if options.tasks and mode != "ddp":
        raise BadInput(
            f"--tasks does not work with --parallel {mode}: the gradient of each task alone is "
            "taken on whole parameters"
        )
    if options.compile and tensor > 1:
        # It trains, but the compiled code keeps the process groups alive when the run is over.
        raise BadInput(f"--compile does not work with --parallel {mode}")


def _check_batch(options: Options, division: Division) -> None:
    """Whether the batch can be cut: into micro-batches, and those for the ranks."""
    parts = division.data * division.micro_batches
    if options.batch_size % parts == 0:
        return
    factors = [f"{division.data} rank{'s' * (division.data > 1)}"]
    if division.tensor > 1:
        factors = [f"{division.data} group{'s' * (division.data > 1)} of {division.tensor} ranks"]
    if division.stages > 1:
        factors = [f"{division.micro_batches} micro-batches for {division.stages} stages"]
    else:
        factors.append(f"--accumulate {division.micro_batches}")
    raise BadInput(
        f"--batch-size {options.batch_size} must be divisible by {parts}, which is "
        + " x ".join(factors)
    )
