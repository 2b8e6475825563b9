"""Which elements of each parameter are read: chosen from its name and a seed, equal on all ranks.

`designs` chooses the samples, `plan` is the tables by which this rank reads its part of them.
"""
