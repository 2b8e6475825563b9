"""A device type `cuda` for the CPU wheel of torch: streams, events and memory as on a GPU.

A process that has loaded it cannot go back, so only child processes do (`simulated_cuda.child`).
"""
