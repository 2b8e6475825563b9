"""How far distmon's numbers are from the float64 truth: `python -m benchmarks.accuracy`."""
