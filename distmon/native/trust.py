"""Whether a file can have been written by this user or root only.

A library runs with all rights of the training process, so it is not loaded when somebody else could
have put it there, or could exchange it after it was checked.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_ROOT = 0


def why_not_trusted(path: Path, user: int | None = None) -> str | None:
    """Return one sentence about who else could write to `path`; None when nobody can.

    `path` is without symlinks; `user` is the effective one unless given. The file, its folder and
    every folder above must belong to the user or root, and only they may write there. A folder
    above the file's own may also be sticky as /tmp is, where nobody can exchange others' entries.
    """
    user = os.geteuid() if user is None else user
    folder = path.parent
    for each in (path, folder, *folder.parents):
        found = each.stat()
        if found.st_uid not in (user, _ROOT):
            return f"{each} belongs to user {found.st_uid}, not to this user or root"
        if found.st_mode & stat.S_ISVTX and each not in (path, folder):
            continue
        if found.st_mode & stat.S_IWOTH:
            return f"everybody can write to {each}"
        # With an access control list the bits of the group stand for everybody that it names.
        listed = found.st_mode & stat.S_IWGRP and _has_access_list(each)
        if listed:
            return f"an access control list lets others write to {each}"
        if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid, user):
            return f"group {found.st_gid} can write to {each}"
    return None


def _has_access_list(path: Path) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except (OSError, AttributeError):  # a file system or platform without them
        return False


def _is_private(group: int, user: int) -> bool:
    """Return whether a group is the user's own, as Debian and Fedora make one for every user.

    Their default umask leaves everything writable for it.
    """
    import grp  # not on Windows, where nothing is built
    import pwd

    if group == _ROOT:
        return False  # containers run as any user of group root
    try:
        owner, members = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    named_alike = owner.pw_gid == group and members.gr_name == owner.pw_name
    return named_alike and set(members.gr_mem) <= {owner.pw_name}
