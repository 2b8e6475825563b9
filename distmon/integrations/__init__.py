"""Monitors without a line in the training loop: frameworks, DeepSpeed, and `distmon run`.

`transformers`, `lightning` and `accelerate` are callbacks, `deepspeed/` follows an engine,
`launcher/` monitors an unmodified script, and `auto/` finds losses, norms and steps for them.
"""
