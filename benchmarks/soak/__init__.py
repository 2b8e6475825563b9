"""Training for hours under random faults, against an unmonitored twin."""
