"""Model FLOPs utilization: the share of the device's peak that the model's own FLOPs use."""
