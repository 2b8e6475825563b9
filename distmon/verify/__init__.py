"""Does the monitor see the same model whichever way it is distributed? Trains it and compares.

`load_workload` -> `expect` (the unsharded truth) and `RankSet` (the distributed runs) -> `compare`.
"""

from distmon.verify.compare import Comparison, Difference, compare
from distmon.verify.runs import Verdict, verify

__all__ = ["Comparison", "Difference", "Verdict", "compare", "verify"]
