"""What many tensors, elements, ranks and parallelisms cost.

    python -m benchmarks.scale planning       # one rank of up to 4096
    python -m benchmarks.scale attach         # how long attaching takes
    python -m benchmarks.scale host-time      # the host transport on up to 4096 ranks, estimated
    python -m benchmarks.scale parallelism    # the same model under each parallelism

Growth with tensors, elements and ranks is a part of `python -m benchmarks.overhead`.
"""
