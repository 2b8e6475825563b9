"""What else a rank measures in a step: losses, norms, time, memory, and modules inside the model.

`losses` and `finite_watch` see every step, `telemetry/` the rank and its device, `signals/` the
training loop, `gradient_gain/` and `inside/` the modules, `task_gradients` the tasks.
"""
