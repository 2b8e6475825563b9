"""Benchmarks of this repository, one folder per question; README.md lists their commands.

Run from the root of the repository: `python -m benchmarks.overhead`.
"""
