"""What the writer process does with the messages of one monitor."""

from __future__ import annotations

import io
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, Final, Literal, cast

import numpy as np
from rich.console import Console

from distmon.config import MonitorConfig
from distmon.errors import RunFolderError
from distmon.record.builder import BuilderInputs, RecordBuilder
from distmon.record.observation import Observation
from distmon.reduce.reduced import Reduced
from distmon.rules import BUILTIN, RuleEngine, configure, with_users_rules
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks import Delivery, build_factories
from distmon.sinks.environment import TrainingProcess
from distmon.sinks.gaps import GapLog
from distmon.untrusted.terminal import terminal
from distmon.writer import sent_observation
from distmon.writer.evaluator import Evaluated, Evaluator, Rest

log = logging.getLogger("distmon")
Answer = Callable[[tuple[Any, ...]], None]
MOST_TEXT: Final = 1 << 20
"""Characters that are kept while standard output is blocked; of more, newer ones are not."""
_EXTRA: Final = ("step", "metrics", "rule")
"""What `sinks.logging_lines` adds to its log records."""


@dataclass(frozen=True)
class Terminal:
    """Where the console sink prints, as rich in the training process finds it."""

    width: int
    is_terminal: bool
    colors: str | None
    encoding: str

    @classmethod
    def of(cls, console: Console) -> Terminal:
        """Describe a console."""
        return cls(console.width, console.is_terminal, console.color_system, console.encoding)


@dataclass(frozen=True)
class Assignment:
    """Everything that a writer needs to know of the run."""

    config: MonitorConfig
    folder: RunFolder
    inputs: BuilderInputs
    training: TrainingProcess
    terminal: Terminal | None = None
    """None where the console sink stays in the training process."""
    own_rules: Collection[str] = ()
    """Names of rules that are functions of the user's, which stay in the training process."""
    state: dict[str, Any] | None = None
    """Of the writer before, which ended."""
    begun: Begin | None = None
    """When the writer before had begun the attempt."""


@dataclass(frozen=True)
class Begin:
    """The first step."""

    resumed_from: int
    elsewhere: frozenset[str] = frozenset()
    """Sinks that stay in the training process."""


@dataclass(frozen=True)
class Request:
    """Something that the training process waits for."""

    what: Literal["state", "record", "close"]


@dataclass(frozen=True)
class Load:
    """A state to continue from, and losses of later steps."""

    state: dict[str, Any]
    losses: Sequence[float] = ()


class Held:
    """Reduced numbers that can be sent: the `read` of an observation."""

    def __init__(self, reduced: Reduced) -> None:
        # Fields of ranks are in the observation, and partial gradients in the sums.
        self._reduced = replace(reduced, ranks={}, partial_gradients=np.zeros(0))

    def __call__(self) -> Reduced:
        return self._reduced


@dataclass(frozen=True)
class SendRecords:
    """Send the whole record with every evaluation from now on."""


@dataclass(frozen=True)
class Failure:
    """An exception as text: what a rule or sink raises may not be picklable."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception."""
        return cls(type(error).__name__, str(error))

    def error(self) -> Exception:
        """Return an exception with the same name and text."""
        made: Exception = type(self.kind, (Exception,), {})(self.text)
        return made


@dataclass
class Texts:
    """Console output on its way to the training process, which prints it; numbered from 1."""

    answer: Answer
    _unprinted: deque[tuple[int, str]] = field(default_factory=deque)
    _sent: int = 0
    _kept: int = 0
    """Characters of the texts that are kept."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, text: str) -> None:
        """Let the training process print a text."""
        with self._lock:
            self._sent += 1
            number = self._sent
            if self._kept + len(text) <= MOST_TEXT:
                self._kept += len(text)
                self._unprinted.append((number, text))
        self.answer(("print", number, text))

    def printed(self, number: int) -> None:
        """Forget a text that was printed, and those before it, which were printed or dropped."""
        with self._lock:
            while self._unprinted and self._unprinted[0][0] <= number:
                self._kept -= len(self._unprinted.popleft()[1])

    def rest(self) -> str:
        """Return what was not printed, as far as it is kept."""
        with self._lock:
            return "".join(text for _, text in self._unprinted)


class _TextFile(io.TextIOBase):
    """What rich prints to."""

    def __init__(self, texts: Texts, encoding: str) -> None:
        self._texts = texts
        self._encoding = encoding
        self._written = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def write(self, text: str) -> int:
        self._written += text
        return len(text)

    def flush(self) -> None:
        text, self._written = self._written, ""
        if text:
            self._texts.send(text)


class LogForwarder(logging.Handler):
    """Sends log records to the training process, whose handlers the user has set up."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def emit(self, record: logging.LogRecord) -> None:
        extra = {key: getattr(record, key) for key in _EXTRA if hasattr(record, key)}
        self._answer(("log", record.name, record.levelno, record.getMessage(), extra))


class Session:
    """Handles one message after another, and returns the result of each."""

    def __init__(self, assignment: Assignment, texts: Texts) -> None:
        self._assignment = assignment
        self._texts = texts
        self._send_records = self._begun = False
        self._gaps = GapLog(assignment.folder)
        self._source = ""
        config = assignment.config
        builder = RecordBuilder(assignment.inputs, mfu_source=lambda: self._source)
        settings = {k: v for k, v in config.rules.items() if k not in assignment.own_rules}
        active = configure(with_users_rules(BUILTIN, settings), settings)
        nowhere = Delivery((), config.queue_size)
        self._evaluator = Evaluator(builder, RuleEngine(active), nowhere, config.check_records)
        if assignment.state is not None:
            self._evaluator.load_state_dict(assignment.state)
        if assignment.begun is not None:
            self._begin(assignment.begun)

    def handle(self, message: object) -> Any:
        """Return the result of a message; an exception as a `Failure`."""
        try:
            return self._handle(message)
        except Exception as error:
            return Failure.of(error)

    def _handle(self, message: object) -> Any:
        match message:
            case (sent_observation.KIND, str() as source, *parts):
                self._source = source
                sent: list[Any] = parts
                observation = sent_observation.from_message(*sent)
                return self._slim(self._evaluator.evaluate(observation))
            case (Observation() as observation, str() as source):
                self._source = source
                return self._slim(self._evaluator.evaluate(observation))
            case Rest():
                return self._slim(self._evaluator.finish(message))
            case Alert():
                self._evaluator.delivery.post_alert(message)
            case Begin() if not self._begun:
                self._begin(message)
            case Begin():  # sent again by a training that does not know that it was received
                pass
            case Request(what="state"):
                return self._evaluator.state_dict()
            case Request(what="record"):
                return self._evaluator.newest
            case Request(what="close"):
                self.close()
                return True
            case Load():
                self._evaluator.load_state_dict(message.state, message.losses)
            case SendRecords():
                self._send_records = True
            case _:
                raise TypeError(f"unknown message {type(message).__name__}")
        return None

    def _begin(self, begin: Begin) -> None:
        """Open the sinks, and see to it that `run.json` has the attempt."""
        folder = self._assignment.folder
        if folder.resumed_from is None:
            self._open_sinks(begin)
            world_size = self._assignment.inputs.world_size
            folder.begin_attempt(resumed_from=begin.resumed_from, world_size=world_size)
            return
        # Another writer has begun the attempt, or ended before it could.
        try:
            folder.continue_attempt()
        except RunFolderError as error:
            log.warning("distmon: %s; it is written when the sinks can write again", error)
        self._open_sinks(begin)

    def _open_sinks(self, begin: Begin) -> None:
        assignment = self._assignment
        console = None
        if (shown := assignment.terminal) is not None:
            console = terminal(
                file=cast(IO[str], _TextFile(self._texts, shown.encoding)),
                width=shown.width,
                force_terminal=shown.is_terminal,
                color_system=shown.colors,
                force_jupyter=False,
            )
        config = assignment.config
        factories = build_factories(
            config, assignment.folder, console, training=assignment.training
        )
        kept = [(name, make) for name, make in factories if name not in begin.elsewhere]
        self._evaluator.delivery = Delivery(kept, config.queue_size, self._gaps)
        self._begun = True

    def _slim(self, evaluated: Evaluated) -> Evaluated:
        """Leave out the record where it is not needed."""
        failures = {name: Failure.of(error) for name, error in evaluated.failures.items()}
        record = evaluated.record if self._send_records else None
        return replace(evaluated, record=record, failures=failures)  # type: ignore[arg-type]

    def close(self, timeout: float = 10.0) -> None:
        """Flush the sinks."""
        self._evaluator.delivery.close(timeout)
        self._assignment.folder.release()
