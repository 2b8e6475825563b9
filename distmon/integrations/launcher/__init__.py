"""`distmon run`: monitor an unmodified training script.

`command` starts the script with `bootstrap/` on PYTHONPATH; `bootstrap/sitecustomize.py` waits for
torch and for the first optimizer, then `training_watch` finds the model and attaches.
"""
