"""From reduced numbers to the record of an observation, the same on every rank.

`observation` is what comes in, `builder` derives the record from it, with `statistics` for the
parameters and a module for each other part; `record` is what rules and sinks get.
"""
