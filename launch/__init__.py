"""A trainer for a small language model: every parallelism of PyTorch, with or without distmon."""
