"""Do the readers survive any bytes: seeded mutations of real run folders, configs and logs."""
