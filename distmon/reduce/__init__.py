"""What ranks exchange in an observation: one SUM and one MAX buffer, in two collectives.

`buffers` are filled on each rank, with its telemetry in a slot of `rank_slots`; `outbox` sends them
on a `channel`; `reduced_view` and `reduced` are the sums as they are read. `locate`, `spectra` and
`task_norms` are the further exchanges that some observations need.
"""
