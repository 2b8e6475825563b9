"""`python -m distmon.deepspeed train.py ...`: monitor a DeepSpeed script without changing it.

    torchrun --nproc-per-node 2 -m distmon.deepspeed train.py --deepspeed_config ds.json
    deepspeed --num_gpus 2 --module distmon.deepspeed train.py --deepspeed_config ds.json

All arguments after the script's name are passed to the script. `--skip-builds` before it keeps
DeepSpeed from compiling its shared-memory collectives on a CPU.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from distmon.errors import DistmonError
from distmon.integrations.deepspeed.auto_attach import enable
from distmon.layout.deepspeed import skip_builds

USAGE = "usage: python -m distmon.deepspeed [--skip-builds] train.py [arguments of train.py]"


def main(arguments: list[str]) -> int:
    """Run the script as `python script.py` would; return 2 for invalid arguments of distmon."""
    own: list[str] = []
    while arguments and arguments[0].startswith("-"):
        own.append(arguments[0])
        arguments = arguments[1:]
    # The deepspeed launcher puts the local rank first; it is passed on to the script.
    passed_on = [a for a in own if a.startswith("--local_rank")]
    unknown = [a for a in own if a not in (*passed_on, "--skip-builds")]
    if unknown or not arguments:
        reason = f"unknown option {unknown[0]}" if unknown else "no script to run"
        print(f"{reason}; {USAGE}", file=sys.stderr)
        return 2
    script = Path(arguments[0])
    if not script.is_file():
        print(f"there is no script {script}; {USAGE}", file=sys.stderr)
        return 2
    try:
        if "--skip-builds" in own:
            skip_builds()
        enable()
        sys.argv = [str(script), *passed_on, *arguments[1:]]
        sys.path[0] = str(script.resolve().parent)
        runpy.run_path(str(script), run_name="__main__")
    except DistmonError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
