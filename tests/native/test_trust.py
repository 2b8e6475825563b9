"""A library that somebody else could have written is refused."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import shutil
from pathlib import Path

import pytest

from distmon.cli import doctor
from distmon.native import load, status
from distmon.native.trust import why_not_trusted

STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file in a folder in a folder, writable for this user only. `/tmp` above it is sticky."""
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True, mode=0o755)
    path = folder / "library.so"
    path.touch(0o755)
    return path.resolve()


def test_own_files_are_trusted(library: Path) -> None:
    assert why_not_trusted(library) is None


@pytest.mark.parametrize("up", [0, 1, 2])
@pytest.mark.parametrize(
    ("mode", "who"), [(0o757, "everybody"), (0o775, "group"), (0o777, "every")]
)
def test_others_must_not_write_to_file_or_folders(
    library: Path, up: int, mode: int, who: str
) -> None:
    place = (library, *library.parents)[up]
    place.chmod(mode)
    reason = why_not_trusted(library)
    place.chmod(0o755)
    assert reason is not None
    assert reason.startswith(who)
    assert reason.endswith(f"can write to {place}")


@needs_root
@pytest.mark.parametrize("up", [0, 1, 2])
def test_file_and_folders_must_belong_to_the_user_or_root(library: Path, up: int) -> None:
    place = (library, *library.parents)[up]
    os.chown(place, STRANGER, -1)
    assert (
        why_not_trusted(library) == f"{place} belongs to user {STRANGER}, not to this user or root"
    )


@needs_root
def test_another_user_trusts_files_of_root_and_its_own(library: Path) -> None:
    assert why_not_trusted(library, user=STRANGER) is None
    os.chown(library, STRANGER, -1)
    assert why_not_trusted(library, user=STRANGER) is None
    assert why_not_trusted(library, user=STRANGER + 1) is not None


@needs_root
def test_only_a_group_of_the_user_alone_may_write(library: Path) -> None:
    alone = next((u for u in pwd.getpwall() if u.pw_uid and _group_alone(u)), None)
    if alone is None:
        pytest.skip("no user here has a group of its own")
    library.chmod(0o775)
    os.chown(library, alone.pw_uid, alone.pw_gid)
    assert why_not_trusted(library, user=alone.pw_uid) is None
    os.chown(library, alone.pw_uid, STRANGER)
    assert why_not_trusted(library, user=alone.pw_uid) == f"group {STRANGER} can write to {library}"


def _group_alone(user: pwd.struct_passwd) -> bool:
    try:
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return False
    return bool(user.pw_gid) and group.gr_name == user.pw_name and not group.gr_mem


def test_a_sticky_folder_is_trusted_above_the_own_one_only(library: Path) -> None:
    library.parents[1].chmod(0o1777)
    assert why_not_trusted(library) is None
    library.parents[0].chmod(0o1777)
    assert why_not_trusted(library) == f"everybody can write to {library.parents[0]}"


@pytest.fixture
def cached(finished: Path, cache: Path) -> Path:
    """The finished module in a cache of its own."""
    cache.mkdir(parents=True, mode=0o700)
    shutil.copy(finished, cache)
    assert status().path == cache / finished.name
    return cache / finished.name


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_module_that_others_can_write_to_is_not_loaded(
    place: str, cached: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cached if place == "file" else cached.parent).chmod(0o777)
    with caplog.at_level(logging.WARNING, "distmon"):
        assert load() is None
    (line,) = caplog.messages
    assert "is not loaded: everybody can write to" in line
    (finding,) = [f for f in doctor.examine() if f.what == "native module"]
    assert finding.verdict == "fails"
    assert "everybody can write to" in finding.detail
    assert finding.detail.endswith("the torch backend is used")


@needs_root
def test_a_module_of_somebody_else_is_not_loaded(cached: Path) -> None:
    os.chown(cached, STRANGER, STRANGER)
    assert status().module is None
    assert f"belongs to user {STRANGER}" in status().reason


def test_what_a_link_leads_to_is_checked(cached: Path, tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    moved = open_folder / cached.name
    shutil.move(cached, moved)
    cached.symlink_to(moved)
    assert status().module is not None
    open_folder.chmod(0o777)
    assert status().module is None
    assert f"everybody can write to {open_folder.resolve()}" in status().reason
