"""Sizes of the code at two commits, side by side: python -m benchmarks.code_size BEFORE [AFTER].

Counts from the files of the commits themselves, without checking them out.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterator, Mapping
from statistics import median

LONG_FUNCTION = 60
MANY_ARGUMENTS = 8
Sources = Mapping[str, str]
"""Text by path."""


def sources(commit: str) -> dict[str, str]:
    """Return every Python file of a commit."""
    listed = _git("ls-tree", "-r", "--name-only", commit).splitlines()
    return {path: _git("show", f"{commit}:{path}") for path in listed if path.endswith(".py")}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def sizes(files: Sources) -> dict[str, str]:
    """Return what the table shows of one commit."""
    package = {path: text for path, text in files.items() if path.startswith("distmon/")}
    lengths = {path: len(text.splitlines()) for path, text in package.items()}
    longest = max(lengths, key=lambda path: lengths[path])
    functions = [each for text in package.values() for each in _functions(text)]
    return {
        "modules at the top level of distmon/": str(sum(p.count("/") == 1 for p in package)),
        "files in distmon/": str(len(package)),
        "lines of the median file": f"{median(lengths.values()):.0f}",
        "lines of the longest file": f"{lengths[longest]} ({longest})",
        "files over 300 lines": str(sum(length > 300 for length in lengths.values())),
        "lines of monitor.py": str(lengths.get("distmon/monitor.py", 0)),
        f"functions over {LONG_FUNCTION} lines": str(
            sum(_lines(f) > LONG_FUNCTION for f in functions)
        ),
        f"constructors over {MANY_ARGUMENTS} arguments": str(
            sum(f.name == "__init__" and _arguments(f) > MANY_ARGUMENTS for f in functions)
        ),
        **{
            f"lines of {folder}/": str(_total(files, folder))
            for folder in ("distmon", "csrc_triton", "launch", "benchmarks", "tests")
        },
    }


def _functions(text: str) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))


def _lines(function: ast.FunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _arguments(function: ast.FunctionDef) -> int:
    """Count the arguments without `self`."""
    given = function.args
    return len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1


def _total(files: Sources, folder: str) -> int:
    return sum(len(t.splitlines()) for p, t in files.items() if p.startswith(f"{folder}/"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="another one")
    given = parser.parse_args()
    before, after = sizes(sources(given.before)), sizes(sources(given.after))
    print(f"| | {given.before} | {given.after} |\n|---|---|---|")
    for name, value in before.items():
        print(f"| {name} | {value} | {after[name]} |")


if __name__ == "__main__":
    main()
