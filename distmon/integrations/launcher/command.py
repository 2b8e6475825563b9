"""`distmon run [torchrun options] train.py [arguments]`: start a script under the monitor."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from distmon.config import load_config
from distmon.errors import ConfigError
from distmon.rules import BUILTIN, configure, with_users_rules
from distmon.untrusted.documents import parse_yaml

PREFIX: Final = "--distmon."
VARIABLE: Final = "_DISTMON_RUN"
"""Environment variable that carries the settings to the processes of the training."""
BOOTSTRAP: Final = Path(__file__).parent / "bootstrap"


@dataclass
class Command:
    """A command line, taken apart."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of the monitor's configuration; `config` is a file."""
    launcher: list[str] = field(default_factory=list)
    """Options of torchrun."""
    script: list[str] = field(default_factory=list)
    """The script or, after `-m`, the module, and its arguments."""
    is_module: bool = False


def torchrun_parser() -> Any:
    """Return the parser of torchrun's options."""
    from torch.distributed import run as torchrun

    parser = torchrun.get_args_parser()
    parser.allow_abbrev = False
    parser.prog = "distmon run"
    return parser


def split(arguments: Sequence[str], parser: Callable[[], Any] = torchrun_parser) -> Command:
    """Take the command line apart; what follows the script is left alone.

    `parser` returns torchrun's, which knows which of its options have a value; without such an
    option it is not called, since importing torch takes seconds. Options are not abbreviated, so
    that `--monitor` belongs to the script.
    """
    command, rest = Command(), [*arguments]
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        name, equals, value = option.partition("=")
        if name.startswith(PREFIX):
            if not equals:
                if not rest:
                    raise ConfigError(f"{name} needs a value")
                value = rest.pop(0)
            set_option(command.settings, name, PREFIX, value)
        elif option in ("-m", "--module"):
            command.is_module = True
        elif (action := parser()._option_string_actions.get(name)) is None:
            raise ConfigError(
                f"distmon run has no option {name}: it takes those of torchrun, and settings such "
                f"as {PREFIX}interval 50; options of the script follow the script"
            )
        else:
            command.launcher.append(option)
            if not equals and action.nargs != 0 and rest:
                command.launcher.append(rest.pop(0))
    if not rest:
        raise ConfigError("distmon run needs a script: distmon run [torchrun options] train.py")
    command.script = rest
    return command


def run(arguments: Sequence[str]) -> None:
    """Replace this process by the training, or run torchrun in it when it is asked for."""
    command = split(arguments)
    overrides = dict(command.settings)
    config = overrides.pop("config", None)
    rules = load_config(config, overrides).rules  # a mistake is reported before anything starts
    configure(with_users_rules(BUILTIN, rules), rules)
    options = None
    if command.launcher:
        options = torchrun_parser().parse_args([*command.launcher, *command.script])
    script = Path(command.script[0])
    program = None if command.is_module or script.suffix == ".py" else shutil.which(script)
    is_program = program or (options and options.no_python)
    if not (command.is_module or is_program or script.is_file()):
        is_path = script.suffix == ".py" or len(script.parts) > 1
        hint = "" if is_path else f"; for a module: distmon run -m {script}"
        raise ConfigError(f"there is no script {script}{hint}")
    config = None if config is None else str(Path(config).absolute())
    starts = {"agent": os.getpid()} if command.launcher else {"script": os.getpid()}
    os.environ[VARIABLE] = json.dumps(
        {"config": config, "overrides": overrides, **({} if program else starts)}
    )
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *([others] if others else [])])
    sys.stdout.flush()
    if options is not None:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

        options.module = command.is_module
        try:
            record(torchrun.run)(options)
        except ChildFailedError as error:  # has which rank failed; the way to it says nothing
            print(str(error).strip(), file=sys.stderr)
            sys.exit(1)
    elif program:  # python, torchrun, accelerate, deepspeed, ...: what it starts is monitored
        os.execv(program, command.script)
    else:
        # Not torchrun: it sets RANK also for a single process, and scripts branch on that.
        python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
        os.execv(sys.executable, [*python, *(["-m"] if command.is_module else []), *command.script])


def leave_children_alone() -> None:
    """Remove from the environment what lets processes that are started from here be monitored."""
    if os.environ.pop(VARIABLE, None) is None:
        return
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if others := [entry for entry in entries if entry != str(BOOTSTRAP)]:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)


def set_option(settings: dict[str, Any], option: str, prefix: str, text: str) -> None:
    """Set the key that `--distmon.rules.frozen.patience 2` names, with `--distmon.` as the prefix.

    Dashes become underscores and dots lead into nested sections; the value is YAML.
    """
    path = option.removeprefix(prefix).replace("-", "_").split(".")
    for part in path[:-1]:
        settings = settings.setdefault(part, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"{option} is inside a key that already has a value")
    settings[path[-1]] = text if path in (["config"], ["run_dir"]) else _value(option, text)


def _value(option: str, text: str) -> Any:
    """Return a number, true, false, null, list or mapping; other text as it is, such as a date."""
    try:
        value = parse_yaml(text)
    except ValueError:
        raise ConfigError(f"{option}: cannot read the value {text!r} as YAML") from None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # YAML 1.1 takes 1e-3 for text
            return float(value)
    is_plain = bool(text.strip()) and isinstance(value, bool | int | float | list | dict | None)
    return value if is_plain else text
