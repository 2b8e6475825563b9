"""How `--parallel` divides ranks, and one sentence for what it cannot divide."""

from __future__ import annotations

import pytest

from launch.options import read_options
from launch.parallel import parallelism_class
from launch.parallel.base import Sizes
from launch.ranks import BadInput


def sizes(arguments: str, world: int) -> Sizes:
    options = read_options(arguments.split(), world)
    return parallelism_class(options.parallel).divide(options, world)


@pytest.mark.parametrize(
    ("arguments", "world", "expected"),
    [
        ("", 1, Sizes()),
        ("--accumulate 2", 4, Sizes(replicas=4, micro_batches=2)),
        ("--parallel fsdp", 4, Sizes(shards=4)),
        ("--parallel fsdp1", 2, Sizes(shards=2)),
        ("--parallel hsdp", 8, Sizes(replicas=2, shards=4)),
        ("--parallel tp", 4, Sizes(tensor=4)),
        ("--parallel fsdp+tp", 8, Sizes(shards=4, tensor=2)),
        (
            "--parallel fsdp+tp --tensor-parallel 4",
            8,
            Sizes(shards=2, tensor=4),
        ),
        ("--parallel pp", 4, Sizes(stages=4, micro_batches=4)),
        ("--parallel pp --accumulate 8", 4, Sizes(stages=4, micro_batches=8)),
    ],
)
def test_sizes(arguments: str, world: int, expected: Sizes) -> None:
    assert sizes(arguments, world) == expected


def test_ranks_that_share_a_layer_or_a_batch_see_the_same_data() -> None:
    ranks = range(4)
    found = {
        mode: [sizes(f"--parallel {mode}", 4).data_rank(rank) for rank in ranks]
        for mode in ("fsdp", "hsdp", "tp", "fsdp+tp", "pp")
    }
    assert found == {
        "fsdp": [0, 1, 2, 3],
        "hsdp": [0, 1, 2, 3],
        "tp": [0, 0, 0, 0],
        "fsdp+tp": [0, 0, 1, 1],
        "pp": [0, 0, 0, 0],
    }


@pytest.mark.parametrize(
    ("arguments", "world", "sentence"),
    [
        ("--parallel fsdp", 1, "--parallel fsdp needs at least 2 ranks; start with torchrun"),
        ("--parallel hsdp", 3, "even number of ranks from 4 on, not 3"),
        ("--parallel hsdp", 2, "even number of ranks from 4 on, not 2"),
        ("--parallel tp", 3, "--heads 4 must be divisible by 3, the ranks that share a layer"),
        ("--parallel tp --context 127", 2, "--context 127 must be divisible by 2"),
        ("--parallel fsdp+tp", 2, "needs a multiple of 2 ranks from 4 on, not 2"),
        ("--parallel fsdp+tp --tensor-parallel 3", 8, "a multiple of 3 ranks from 6 on, not 8"),
        (
            "--parallel fsdp+tp --tensor-parallel 1",
            8,
            "Invalid value for '--tensor-parallel': Input should be greater than or equal to 2",
        ),
        ("--tensor-parallel 2", 2, "--tensor-parallel is for --parallel fsdp+tp, not ddp"),
        ("--parallel tp --tensor-parallel 2", 2, "not tp, which uses all ranks"),
        ("--parallel pp", 8, "a block for each of its 8 stages and --layers is 4"),
        ("--parallel pp --tied", 2, "--tied does not work with --parallel pp"),
        ("--parallel tp --compile", 2, "--compile does not work with --parallel tp"),
        ("--parallel fsdp+tp --compile", 4, "--compile does not work with --parallel fsdp"),
        ("--parallel fsdp --tasks", 2, "--tasks does not work with --parallel fsdp"),
        ("--parallel pp --tasks", 2, "--tasks does not work with --parallel pp"),
        ("--parallel deepspeed --bf16-weights", 2, "whose engine keeps float32 copies of the"),
        ("--parallel deepspeed --inject dead", 2, "--inject dead does not work with --parallel"),
        (
            "--parallel zero",
            2,
            "Invalid value for '--parallel': Value error, 'zero' is not one of 'ddp'",
        ),
        (
            "--parallel fsdp+tp --batch-size 3",
            4,
            "divisible by 2, which is 2 groups of 2 ranks x --accumulate 1",
        ),
        (
            "--parallel pp --batch-size 6",
            4,
            "divisible by 4, which is 4 micro-batches for 4 stages",
        ),
    ],
)
def test_what_cannot_be_divided_is_one_sentence(arguments: str, world: int, sentence: str) -> None:
    with pytest.raises(BadInput) as found:
        sizes(arguments, world)
    assert sentence in str(found.value)
    assert "\n" not in str(found.value)
