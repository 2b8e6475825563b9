"""The writer process: derives records, evaluates rules and writes sinks beside the training.

It runs on rank 0's host, without torch. The training process sends it reduced numbers through
shared memory and waits for nothing.
"""
