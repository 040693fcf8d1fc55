"""Publishing: a directory that comes into being whole, or not at all.

Everything is written into `<path>.partial`, which says in a file of its own that it is incomplete.
When all is on the disk, that file goes and the directory takes its final name in one step; an
older checkpoint of that name is there until then.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Mapping
from typing import Final

from ckptx.errors import CheckpointPlanError, WriteError
from ckptx.formats.source import INCOMPLETE
from ckptx.integrity import FILE as INTEGRITY_FILE
from ckptx.writer import write_bytes, write_error
from distcore.v1 import Problem

PARTIAL: Final = ".partial"
REPLACED: Final = ".replaced"
_EXCHANGE: Final = 2
_HERE: Final = -100
_OURS: Final = (".safetensors", ".distcp", ".index.json", ".metadata", INTEGRITY_FILE, INCOMPLETE)


def partial_of(path: str) -> str:
    """The directory into which a checkpoint for `path` is written first."""
    return path.rstrip("/") + PARTIAL


def prepare(path: str, *, overwrite: bool) -> None:
    """Make an empty directory beside `path`, marked as incomplete.

    What an earlier save that did not come to its end has left there is removed. Raises
    CheckpointPlanError where `path` is there already and may not be replaced: `overwrite` is not
    set, or there are files in it that are no checkpoint's.
    """
    partial = partial_of(path)
    replaced = path.rstrip("/") + REPLACED
    try:
        if os.path.isdir(replaced) and not os.path.exists(path):
            os.rename(replaced, path)
        _check_target(path, overwrite=overwrite)
        for left in (partial, replaced):
            if os.path.isdir(left):
                _remove(left)
        os.makedirs(partial)
    except OSError as error:
        raise write_error(error, error.filename or partial) from error
    write_bytes(b"", os.path.join(partial, INCOMPLETE))


def _check_target(path: str, *, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path) or os.path.islink(path):
        raise CheckpointPlanError(Problem("path", "exists", f"{path} is not a directory"))
    names = sorted(os.listdir(path))
    if names and not overwrite:
        text = f"{path} is there already; overwrite=True replaces it once the new one is complete"
        raise CheckpointPlanError(Problem("path", "exists", text))
    foreign = [name for name in names if not name.endswith(_OURS)]
    if foreign:
        text = f"{path} has files that are no checkpoint's and would be lost: {foreign[:5]}"
        raise CheckpointPlanError(Problem("path", "exists", text))


def publish(path: str, sizes: Mapping[str, int], last: Mapping[str, bytes]) -> None:
    """Complete the directory beside `path` with its `last` files, and give it its name.

    `sizes` are the files that all ranks have written, in bytes. WriteError where one is not there
    as it should be, or where the system refuses.
    """
    partial = partial_of(path)
    for name, nbytes in sizes.items():
        file = os.path.join(partial, name)
        found = os.path.getsize(file) if os.path.exists(file) else None
        if found != nbytes:
            text = (
                f"expected {nbytes} bytes, found {'no file' if found is None else found}; all "
                f"ranks must write into one directory that they share"
            )
            raise WriteError(errno.EIO, text, file)
    for name, data in last.items():
        write_bytes(data, os.path.join(partial, name))
    try:
        sync_directory(partial)
        os.unlink(os.path.join(partial, INCOMPLETE))
        sync_directory(partial)
        _rename(partial, path)
        sync_directory(os.path.dirname(os.path.abspath(path)))
    except OSError as error:
        raise write_error(error, error.filename or path) from error


def _rename(partial: str, path: str) -> None:
    """Give the directory its name; one that has the name already is removed afterwards."""
    if not os.path.isdir(path) or not os.listdir(path):
        # An empty directory is replaced in one step, as nothing is.
        os.rename(partial, path)
    elif exchange(partial, path):
        _remove(partial)
    else:
        replaced = path.rstrip("/") + REPLACED
        os.rename(path, replaced)
        os.rename(partial, path)
        _remove(replaced)


def _remove(path: str) -> None:
    """Remove a directory that says it is incomplete from the first moment to the last."""
    marker = os.path.join(path, INCOMPLETE)
    if not os.path.exists(marker):
        write_bytes(b"", marker)
    for name in os.listdir(path):
        file = os.path.join(path, name)
        if os.path.isdir(file) and not os.path.islink(file):
            shutil.rmtree(file)
        elif name != INCOMPLETE:
            os.unlink(file)
    os.unlink(marker)
    os.rmdir(path)


def exchange(one: str, other: str) -> bool:
    """Swap the names of two directories in one step; False where the system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    failed = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    if failed and ctypes.get_errno() not in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), one)
    return not failed


def sync_directory(path: str) -> None:
    """Wait until the names in a directory are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
