"""Where the bytes of a file come from. A source has a `name` for messages, a `size`, and reads into memory of ours."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from rollout_audit.errors import AuditError
from rollout_audit.readers.remote import RemoteBytes, is_url


class ByteSource(Protocol):
    """What a reader of a format needs to know of a file. Raises AuditError where the bytes cannot be had."""

    name: str
    size: int
    place: str
    """The path or URL that another process can open."""
    identity: tuple[Any, ...]
    """What differs when the file is written again; the first of it may differ from machine to machine too."""

    def is_unchanged(self) -> bool:
        """Whether the path still leads to the file that was opened, as it was then."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset` on; the number of bytes read is smaller only where the file ends."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Tell which (offset, length) this thread reads next, so that a slow source can fetch them together."""


def open_source(path: str) -> ByteSource:
    """The source of a path or URL."""
    return RemoteBytes(path) if is_url(path) else LocalBytes(path)


class LocalBytes:
    """A regular file, read with preadv: one that shrinks meanwhile is a short read, and no SIGBUS."""

    def __init__(self, path: str) -> None:
        self.name, self.place = path, os.path.abspath(path)
        try:
            # Not waiting for the writer of a FIFO, which is refused below.
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            if os.path.islink(path):
                raise AuditError("a link to nothing", path=path, found=os.readlink(path)) from None
            raise AuditError("no such file", path=path) from None
        except PermissionError:
            raise AuditError(
                "permission denied", path=path, do="safetensors writes files as 0600; ask their owner to chmod a+r them"
            ) from None
        except OSError as exc:
            raise AuditError(f"cannot be opened: {exc.strerror}", path=path) from None
        weakref.finalize(self, os.close, self.fd)
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            raise AuditError("not a file but a pipe or a device", path=path, do="save it to a file first")
        self.size, self.identity = status.st_size, _identity(status)

    def is_unchanged(self) -> bool:
        try:
            return _identity(os.stat(self.place)) == self.identity
        except OSError:
            return False

    def read_into(self, view: memoryview, offset: int) -> int:
        done = 0
        try:
            while done < len(view) and (got := os.preadv(self.fd, [view[done:]], offset + done)):
                done += got
        except OSError as exc:
            raise AuditError(f"cannot be read: {exc.strerror}", path=self.name) from None
        return done

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        pass  # the kernel reads ahead


def _identity(status: os.stat_result) -> tuple[int, ...]:
    # st_ctime too: `rsync --inplace --times` and `touch -r` restore st_mtime after they wrote.
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
