"""How an observation goes through the other rooms, on the training thread and beside it.

`assembly` puts the parts together. `observation_cycle` takes an observation from its snapshot
(`row_measurement`) over all ranks (`observer`) to its evaluation (`arrivals`), which is in a
process (`writer_process`) or a thread (`worker`). `schedule` says when, `self_cost` and `budget`
what it may cost, `decisions` and `actions` what follows.
"""
