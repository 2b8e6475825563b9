"""A log that fails does not fail what is logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_runs import quiet, small_model

import distmon


class _Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002
        raise RuntimeError("planted")


@pytest.fixture
def raising() -> Iterator[None]:
    handler = _Raises()
    logging.getLogger("distmon").addHandler(handler)
    yield
    logging.getLogger("distmon").removeHandler(handler)


@pytest.mark.usefixtures("raising")
def test_a_handler_of_the_user_that_raises_does_not_reach_the_training(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "file").write_text("x")
    with distmon.attach(model, optimizer, **quiet(tmp_path / "file")) as monitor:
        monitor.step(step="no number")  # type: ignore[arg-type]
        assert monitor.schedule.completed == 1


def test_an_entry_names_the_line_that_has_logged_it(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("distmon").warning("here")
    (entry,) = caplog.records
    assert Path(entry.pathname).name == Path(__file__).name
