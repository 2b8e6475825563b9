"""Size of reports and time until their first plot, by number of parameters and observations."""
