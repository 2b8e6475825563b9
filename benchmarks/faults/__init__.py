"""The fault matrix: what training and records lose when something goes wrong around the monitor."""
