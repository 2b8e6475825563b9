"""Model FLOPs utilization: how much of the device's peak goes into the model's own arithmetic."""
