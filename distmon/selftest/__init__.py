"""`python -m distmon.selftest`: what works on this machine's device, as a table and a file."""
