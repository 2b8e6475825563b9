"""What the Triton kernels cost: resources per architecture, bytes moved, host time, launches.

    python -m benchmarks.kernels            # everything; compiles for about a minute
    python -m benchmarks.kernels --quick    # without compiling

Without a GPU no GPU time is printed: resources are read from the compiled binaries and the roofline
line is labelled as an estimate. On a machine with CUDA the same command also measures.
"""
