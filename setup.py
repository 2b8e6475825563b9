"""What pyproject.toml cannot say: `benchmarks/` is installed under a name that is nobody else's."""

from setuptools import find_packages, setup

BENCHMARKS = {"distmon_benchmarks": "benchmarks"}

setup(
    packages=[
        *find_packages(include=["distmon*", "csrc_triton*"]),
        *BENCHMARKS,
        *(f"distmon_benchmarks.{name}" for name in find_packages("benchmarks")),
    ],
    package_dir=BENCHMARKS,
)
