"""Monitors of other projects and other naive ways, one file each, and the list of all contenders.

    python -m benchmarks.contenders    # which can run here, and how to install the others

They are not in the package because `distmon bench` does without them: distmon's cost is shown by
the bare step, and what it is compared with by torch alone. To measure your own model against them:
`python -m benchmarks.overhead --model mymodule:factory`.
"""

from typing import Final

from benchmarks.contenders.composer_monitor import COMPOSER
from benchmarks.contenders.naive_hooks import NAIVE_HOOKS
from benchmarks.contenders.olmo_style import OLMO_STYLE
from benchmarks.contenders.tensorboard_histograms import TENSORBOARD
from benchmarks.contenders.wandb_watch import WANDB_WATCH
from distmon.bench.contender import Contender
from distmon.bench.contenders import BUILT_IN

CONTENDERS: Final[tuple[Contender, ...]] = (
    *BUILT_IN,
    NAIVE_HOOKS,
    OLMO_STYLE,
    COMPOSER,
    TENSORBOARD,
    WANDB_WATCH,
)
"""In the order in which tables list them."""
