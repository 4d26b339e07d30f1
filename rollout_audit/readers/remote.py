"""Files on any file system that fsspec knows: s3://, gs://, hf://, https://, memory:// and the rest.

fsspec and its back ends are imported when a URL is used, and not before. Logging in is theirs: environment variables
and config files as their own tools read them. Each call is tried a few times where the fault may pass; what the user
can mend is one AuditError.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_audit.errors import AuditError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hf", "http": "http", "https": "http"}
_WAITS = (0.2, 0.6, 1.8)
"""Seconds before each further try."""
_VERSION = ("size", "ETag", "etag", "generation", "blob_id", "mtime", "modified", "LastModified", "Last-Modified")
"""What file systems say of a file that is another one after it was written again."""
_SECRET = re.compile(
    r"(?<=[?&])([^=&\s]*(?:signature|sig|token|secret|credential|password|key|auth)[^=&\s]*)=[^&\s'\"]+", re.IGNORECASE
)


def is_url(word: str) -> bool:
    """Whether fsspec is to open it: everything else is a local path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", word, re.IGNORECASE) is not None


def without_secrets(text: str) -> str:
    """Text whose URLs show no password and no signature, so that it can be printed."""
    text = re.sub(r"(https?://)[^/\s@]+@|(://[^/\s:@]*:)[^/\s@]+@", r"\1\2***@", text, flags=re.IGNORECASE)
    return _SECRET.sub(r"\1=***", text)


def file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and the path there. Raises AuditError for a scheme that cannot be used here."""
    scheme, rest = url.split("://", 1)
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(f"{scheme.lower()}://{rest}")
    except ImportError as exc:
        extra = _EXTRAS.get(scheme.lower())
        raise AuditError(
            f"{scheme.lower()}:// needs a package that is not installed",
            path=without_secrets(url),
            found=" ".join(str(exc).split()),
            do=f"pip install 'rollout-audit[{extra}]'" if extra else None,
        ) from None
    except ValueError as exc:
        wanted = "a local path, or s3://, gs://, hf://, https:// or another scheme of fsspec"
        raise AuditError(f"cannot be opened: {exc}", path=without_secrets(url), wanted=wanted) from None
    return fs, path


def ask(fs: AbstractFileSystem, what: str | Callable[[], str], name: str, call: Callable[[], T]) -> T:
    """What a file system answers, after a few tries. Raises AuditError, with the message `what`, when it does not."""
    waits = () if hasattr(fs, "retries") else _WAITS  # s3fs and gcsfs have their own tries, some seconds of them
    tries = 0
    while True:
        tries += 1
        try:
            return call()
        except Exception as exc:  # each back end has exceptions of its own, without a common base
            # fsspec's HTTP says "not found" of every fault, and keeps the fault itself as the cause.
            fault = (
                exc.__cause__ if isinstance(exc, FileNotFoundError) and isinstance(exc.__cause__, Exception) else exc
            )
            if tries > len(waits) or not _may_pass(fault):
                raise _refusal(what if isinstance(what, str) else what(), name, fault, tries) from None
        time.sleep(waits[tries - 1])


def _status(fault: BaseException) -> int | None:
    """The HTTP status behind a fault, wherever the library keeps it."""
    for exc in (fault, fault.__cause__):
        response = getattr(exc, "response", None)
        if isinstance(response, dict):  # botocore
            answer = response.get("ResponseMetadata", {})
            return int(answer["HTTPStatusCode"]) if "HTTPStatusCode" in answer else None
        # aiohttp, huggingface_hub and gcsfs; aiohttp warns of its own `code`
        for holder, attribute in ((exc, "status"), (response, "status_code"), (exc, "code")):
            if isinstance(status := getattr(holder, attribute, None), int):
                return status
    return None


def _may_pass(fault: Exception) -> bool:
    status = _status(fault)
    if status is not None:
        return status >= 500 or status in (408, 429)
    if isinstance(fault, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)):
        return False
    # By name: the bases of faults of connection in aiohttp, botocore and httpx, which may not be installed.
    bases = {base.__name__ for base in type(fault).__mro__}
    return bool(bases & {"OSError", "EOFError", "TimeoutError", "ClientError", "HTTPClientError", "TransportError"})


def _refusal(what: str, name: str, fault: Exception, tries: int) -> AuditError:
    status, text = _status(fault), without_secrets(" ".join(str(fault).split()))
    text = f"{type(fault).__name__}: {text}" if text else type(fault).__name__
    if status in (404, 410) or (status is None and isinstance(fault, FileNotFoundError)):
        return AuditError("no such file, folder or bucket", path=name, found=text)
    if status in (401, 403) or isinstance(fault, PermissionError) or "credential" in text.lower():
        do = "log in as the tools of that store do: environment variables or config files"
        return AuditError("permission denied", path=name, found=text, do=do)
    if status == 416:
        return AuditError("it shrank while it was read", path=name, found=text, do="run again when it is written")
    if tries > 1:
        text += f" ({tries} tries)"
    return AuditError(what, path=name, found=text, do="run again later, or copy it here first")


def expand(url: str, suffix: str) -> list[str]:
    """Files of a URL: itself, those below a folder, or those that match a glob.

    Raises AuditError where nothing is found, or where the file system cannot list.
    """
    (fs, path), name = file_system(url), without_secrets(url)
    web = url.lower().startswith(("http://", "https://"))
    pattern = re.search(r"\*", url.split("?")[0]) if web else re.search(r"[*?[]", path)
    if pattern:
        matches = ask(fs, "the pattern cannot be looked up", name, lambda: fs.glob(path, detail=True))
        if files := [p for match, info in matches.items() for p in _files(fs, match, info["type"], suffix, name)]:
            return [fs.unstrip_protocol(p) for p in files]
        if web or not ask(fs, "cannot be opened", name, lambda: fs.exists(path)):
            raise AuditError("no file matches this pattern", path=name)
    # A web page that lists files ends in a slash; to ask for its kind would fetch it, and a dump as well.
    kind = (
        "directory" if web and path.endswith("/") else ask(fs, "cannot be opened", name, lambda: fs.info(path))["type"]
    )
    if kind != "directory":
        return [url]
    inside = _files(fs, path, kind, "", name)
    dumps = [fs.unstrip_protocol(p) for p in inside if p.endswith(suffix)]
    if not dumps:
        raise no_dumps(name, inside, suffix)
    return dumps


def _files(fs: AbstractFileSystem, path: str, kind: str, suffix: str, name: str) -> list[str]:
    if kind != "directory":
        return [path]
    return [p for p in ask(fs, "cannot be listed", name, lambda: fs.find(path)) if p.endswith(suffix)]


def no_dumps(folder: str, inside: list[str], suffix: str) -> AuditError:
    """What is said of a folder with other files only, or none."""
    kinds = sorted({os.path.splitext(path)[1] or "no suffix" for path in inside})
    return AuditError(
        "a folder without dumps",
        path=folder,
        wanted=f"*{suffix} in it or below",
        found=f"{len(inside)} files ({', '.join(kinds)})" if inside else "no files",
    )


class RemoteBytes:
    """A file behind a URL: only the ranges that are asked for are fetched, and only of the file that was opened.

    Worker threads fetch while others compute, so more `--threads` than cores are of use over a slow network.
    """

    def __init__(self, url: str) -> None:
        self.name, self.place = without_secrets(url), url
        self.fs, self.path = file_system(url)
        self.size, self.identity = self._ask()
        self._fetched = threading.local()
        if url.lower().startswith(("http://", "https://")) and self.size > 1:
            ask(self.fs, "byte ranges cannot be read", self.name, self._try_a_range)

    def _ask(self) -> tuple[int, tuple[Any, ...]]:
        info = ask(self.fs, "cannot be opened", self.name, lambda: self.fs.info(self.path))
        if info["type"] == "directory":
            raise AuditError("a folder, not a file", path=self.name)
        if info.get("partial") is False or info.get("size") is None:
            raise AuditError(
                "the server gives no size or no byte ranges",
                path=self.name,
                wanted="Content-Length and Accept-Ranges: bytes",
                do="copy it here first",
            )
        return info["size"], (None, *((key, str(info[key])) for key in _VERSION if key in info))

    def is_unchanged(self) -> bool:
        self.fs.invalidate_cache(self.path)
        return self._ask()[1] == self.identity

    def _try_a_range(self) -> None:
        """The second byte through fsspec's file object, which leaves a server that begins to send the whole file."""
        with self.fs.open(self.path, size=self.size, cache_type="none") as file:
            file.seek(1)
            file.read(1)

    def read_into(self, view: memoryview, offset: int) -> int:
        if not len(view):
            return 0
        self.prefetch([(offset, len(view))])
        view[:] = self._fetched.ranges.pop((offset, len(view)))
        return len(view)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        if not hasattr(self._fetched, "ranges"):
            self._fetched.ranges = {}
        ready: dict[tuple[int, int], bytes] = self._fetched.ranges
        wanted = [place for place in dict.fromkeys(ranges) if place[1] and place not in ready]
        if not wanted:
            return
        ready |= self._fetch(wanted)

    def _fetch(self, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        # Without this, back ends that read through file objects fetch 5 MB ahead of each range.
        plain = {} if self.fs.async_impl else {"cache_type": "none"}
        fetched: dict[tuple[int, int], bytes] = {}

        def left() -> list[tuple[int, int]]:
            return [place for place in wanted if place not in fetched]

        def get() -> None:
            places = left()
            starts, ends = [offset for offset, _ in places], [offset + length for offset, length in places]
            answers = self.fs.cat_ranges([self.path] * len(places), starts, ends, on_error="return", **plain)
            fetched.update((place, a) for place, a in zip(places, answers, strict=True) if isinstance(a, bytes))
            if faults := [answer for answer in answers if isinstance(answer, Exception)]:
                raise faults[0]

        ask(self.fs, lambda: f"{_bytes(left()[0])} cannot be read", self.name, get)
        for place, answer in fetched.items():
            if len(answer) != place[1]:
                raise AuditError(
                    f"{_bytes(place)} cannot be read",
                    path=self.name,
                    wanted=f"{place[1]:,} bytes",
                    found=f"{len(answer):,} bytes in the answer",
                    do="wait until it is written, or copy it here first",
                )
        return fetched


def _bytes(place: tuple[int, int]) -> str:
    return f"bytes {place[0]:,} to {place[0] + place[1] - 1:,}"
