"""Check that the monitor records the same statistics under every parallelism.

`load_workload` -> `expect` (the unsharded reference) and `RankProcesses` (the distributed runs) ->
`compare`.
"""

from distmon.verify.compare import Comparison, compare
from distmon.verify.difference import Difference
from distmon.verify.verification import Verdict, verify

__all__ = ["Comparison", "Difference", "Verdict", "compare", "verify"]
