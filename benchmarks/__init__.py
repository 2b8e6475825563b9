"""What watching a training costs, measured side by side: `python benchmarks/overhead.py`.

Installed as the package `distmon_benchmarks`, so that `distmon bench` finds it.
"""
