"""`python docs/run_readme.py`: run the README from top to bottom in a fresh virtualenv.

Every line of its `sh` blocks and every `python` block is run in a copy of the repository, with
nothing installed but what the README installs. Python blocks that begin with `# needs:` are skipped
there. Targets of make, which install a virtualenv of their own, are only checked with `make -n`.
Exit code 1 when something fails; a failed installation ends it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the text of every fenced block that has a language."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)


def commands(block: str) -> list[str]:
    """Return the commands of a shell block, without comments."""
    lines = (" ".join(shlex.split(line, comments=True)) for line in block.splitlines())
    return [line for line in lines if line]


def main() -> int:
    """Run everything; print each command, its exit code and its seconds."""
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        copy, venv = Path(scratch) / "repository", Path(scratch) / "venv"
        shutil.copytree(ROOT, copy, ignore=not_of_the_repository)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        environment = only_with(venv / "bin", os.environ)
        for language, block in blocks((ROOT / "README.md").read_text()):
            for name, command in _prepared(language, block, copy):
                begin = time.perf_counter()
                done = subprocess.run(
                    command, cwd=copy, env=environment, text=True, capture_output=True, check=False
                )
                seconds = time.perf_counter() - begin
                print(f"exit {done.returncode}, {seconds:5.1f} s: {name}", flush=True)
                if done.returncode:
                    failed += 1
                    print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
                    if name.startswith("pip"):
                        print("what follows needs it and is not run")
                        return 1
    print(f"{failed} failed")
    return int(failed > 0)


def not_of_the_repository(folder: str, names: list[str]) -> set[str]:
    """Return the names in `folder` that are not copied; `runs` is a package further down."""
    ignored = {name for name in names if name == "__pycache__" or name.endswith("_cache")}
    if Path(folder) == ROOT:
        ignored |= {".git", ".venv", "build", "runs"}.intersection(names)
    return ignored


def only_with(programs: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with one more folder of programs, and without the virtualenv of
    this process: a command that is missing in the fresh one must not be found there.
    """
    environment = {k: v for k, v in environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    here = Path(sys.executable).parent
    folders = environ.get("PATH", "").split(os.pathsep)
    if sys.prefix != sys.base_prefix:
        folders = [folder for folder in folders if Path(folder) != here]
    environment["PATH"] = os.pathsep.join([str(programs), *folders])
    return environment


def _prepared(language: str, block: str, folder: Path) -> list[tuple[str, list[str]]]:
    if language == "sh":
        return [(line, _command(line)) for line in commands(block)]
    if language != "python" or block.startswith("# needs:"):
        print(f"skipped: {block.splitlines()[0]}", flush=True)
        return []
    script = folder / "snippet.py"
    script.write_text(block)
    return [(f"python block: {block.splitlines()[0]}", ["python", str(script)])]


def _command(line: str) -> list[str]:
    words = line.split()
    if words[0] == "make":
        return ["make", "-n", *words[1:]]
    if words[:2] == ["pip", "install"]:
        return ["python", "-m", *words, "-q", "-c", "constraints.txt"]
    return words


if __name__ == "__main__":
    sys.exit(main())
