"""Measure what monitoring costs: contenders take turns on real training steps.

`distmon bench` measures the user's own model; `benchmarks/` in the repository measures fixed ones
with more contenders. The flow: `contender` and `training` say what runs, `interleaved` times it,
`truth` checks every answer, `footprint` counts memory, `results` is the one file of a run, and
`report` and `plot` read that file.
"""
