"""A .safetensors file: its header, checked, and rows of its tensors, without mapping it and without torch.

The header is 8 bytes (its length, little endian) and JSON: {name: {dtype, shape, data_offsets}, "__metadata__": ...}
(https://github.com/huggingface/safetensors, "Format"). Rows are read into a buffer of ours: a file that shrinks
meanwhile is a short read and a message, where a mapped one would kill the process with SIGBUS.
"""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_audit.errors import AuditError
from rollout_audit.readers.byte_source import open_source

ITEM_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
FLOATS = ("F16", "BF16", "F32", "F64")
_MAX_HEADER = 100_000_000
_MAX_AXES = 64  # as in numpy
_LARGE_BYTES = 3_800_000
_LOOKS_LIKE = {
    b"PK\x03\x04": "it looks like a zip file: a torch .pt or a .npz",
    b"version https://git-lfs": "it is a git-lfs pointer: the file itself has not been fetched (git lfs pull)",
    b"\x80": "it looks like a pickle",
    b"PAR1": "it looks like parquet",
    b"\x89HDF": "it looks like HDF5",
    b"\x93NUMPY": "it looks like a numpy .npy file",
    b"\x1f\x8b": "it looks like gzip: unpack it first",
    b"\x28\xb5\x2f\xfd": "it looks like zstd: unpack it first",
    b"{": "it looks like JSON",
    b"<": "it looks like HTML or XML: a page saved in place of the file",
}


@dataclass(frozen=True)
class TensorInfo:
    """What the header says of one tensor; `start` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first axis."""
        size = ITEM_SIZES[self.dtype]
        for n in self.shape[1:]:
            size *= n
        return size


def allow_open_files(number: int) -> None:
    """As many open files as there are dumps: a shell often allows 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + 256 if hard == resource.RLIM_INFINITY else min(number + 256, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Buffers(threading.local):
    """Buffers that are read into again and again, each thread its own: fresh memory costs more than the reading."""

    def __init__(self) -> None:
        self.by_name: dict[str, npt.NDArray[np.uint8]] = {}

    def of(self, name: str, num_bytes: int) -> npt.NDArray[np.uint8]:
        if num_bytes > _LARGE_BYTES:  # of a huge row: it counts against the memory, and its time is nothing
            return np.empty(num_bytes, np.uint8)
        buffer = self.by_name.get(name)
        if buffer is None or buffer.size < num_bytes:
            buffer = self.by_name[name] = np.empty(num_bytes, np.uint8)
        return buffer[:num_bytes]


class SafetensorsFile:
    """An open file, local or remote, with a sound header.

    Raises AuditError for anything else: not this format, truncated, or a header that does not fit the file.
    """

    def __init__(self, path: str) -> None:
        self.source = open_source(path)
        self.path = self.source.name
        self.tensors, self.metadata = self._read_header()

    def check_unchanged(self) -> None:
        """Raises AuditError if the path no longer leads to the bytes that were opened."""
        if not self.source.is_unchanged():
            raise AuditError(
                "it was written to, replaced or removed while it was read",
                path=self.path,
                do="wait until it is written, then run again",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process goes where the file is; its bytes do not travel."""
        return _OpenedElsewhere, (self.path, self.source.place, self.tensors, self.metadata, self.source.identity)

    def _bad(self, what: str, **more: str) -> AuditError:
        return AuditError(f"not a usable safetensors file: {what}", path=self.path, **more)

    def _read_header(self) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        size = self.source.size
        start = self._bytes(24, 0)
        if size == 0:
            raise self._bad("it is empty")
        guess = next((text for magic, text in _LOOKS_LIKE.items() if start.startswith(magic)), "")
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > _MAX_HEADER or not start[8:9] == b"{":
            raise self._bad(
                guess or "no safetensors header", found=f"{size:,} bytes", wanted="8 bytes of header length, then JSON"
            )
        if 8 + length > size:
            raise self._bad("truncated in the header", wanted=f"{8 + length:,} bytes", found=f"{size:,} bytes")
        raw = self._bytes(length, 8)
        if len(raw) < length:
            raise self._bad("it shrank while it was read")
        try:
            header = json.loads(raw, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as exc:
            raise self._bad(f"the header is not JSON ({exc})") from None
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise self._bad("__metadata__ is not an object")
        tensors = {name: self._tensor(name, info, 8 + length) for name, info in header.items()}
        self._check_cover(header, size - 8 - length)
        return tensors, {str(key): str(value) for key, value in metadata.items()}

    def _bytes(self, length: int, offset: int) -> bytes:
        buffer = bytearray(min(length, self.source.size - offset))
        return bytes(buffer[: self.source.read_into(memoryview(buffer), offset)])

    def _tensor(self, name: str, info: Any, data_start: int) -> TensorInfo:
        try:
            dtype, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
            numbers = [*shape, begin, end]
        except (TypeError, KeyError, ValueError):
            raise self._bad(f"the header's entry of '{name}' is malformed") from None
        if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or not isinstance(shape, list):
            raise self._bad(f"shape or offsets of '{name}' are no whole numbers from 0 to 2**63 - 1")
        if len(shape) > _MAX_AXES:
            raise self._bad(f"'{name}' has {len(shape):,} axes", wanted=f"at most {_MAX_AXES}")
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise self._bad(f"'{name}' has dtype {dtype}", wanted="one of " + ", ".join(ITEM_SIZES))
        elements = 1
        for n in shape:
            elements *= n
        if end - begin != elements * ITEM_SIZES[dtype]:
            raise self._bad(
                f"the header lies: '{name}' is {dtype} {shape}",
                wanted=f"{elements * ITEM_SIZES[dtype]:,} bytes",
                found=f"{end - begin:,} bytes",
            )
        return TensorInfo(name, dtype, tuple(shape), data_start + begin)

    def _check_cover(self, header: dict[str, Any], data_size: int) -> None:
        """Tensors lie one after the other, from the end of the header to the end of the file."""
        position = 0
        for name, info in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            begin, end = info["data_offsets"]
            if begin != position:
                kind = "overlaps another tensor" if begin < position else "leaves a hole before it"
                raise self._bad(f"the header lies: '{name}' {kind}")
            position = end
        if position > data_size:
            raise self._bad(
                "truncated",
                wanted=f"{position:,} bytes of tensors",
                found=f"{data_size:,} bytes",
                do="copy it again, or wait until it is written",
            )
        if position < data_size:
            raise self._bad("bytes after the last tensor", wanted=f"{position:,} bytes", found=f"{data_size:,} bytes")

    def read(
        self, name: str, first: int = 0, last: int | None = None, *, kept: Buffers | None = None
    ) -> npt.NDArray[np.uint8]:
        """Bytes of rows first..last-1 of a tensor (of all of it, for one without axes).

        With `kept`, in a buffer that the next read of the same name will overwrite.
        """
        offset, num_bytes = self._place(name, first, last)
        buffer = np.empty(num_bytes, np.uint8) if kept is None else kept.of(name, num_bytes)
        if self.source.read_into(memoryview(buffer.data), offset) < num_bytes:
            raise AuditError(
                f"it shrank while '{name}' was read", path=self.path, do="wait until it is written, then run again"
            )
        return buffer

    def prefetch(self, rows: Iterable[tuple[str, int, int | None]]) -> None:
        """Tell which (tensor, first, last) this thread reads next: of a remote file they are fetched together."""
        self.source.prefetch([self._place(*place) for place in rows])

    def _place(self, name: str, first: int, last: int | None) -> tuple[int, int]:
        """Offset and number of bytes of these rows."""
        info = self.tensors[name]
        last = (info.shape[0] if info.shape else 1) if last is None else last
        return info.start + first * info.row_bytes, (last - first) * info.row_bytes


class _OpenedElsewhere(SafetensorsFile):
    """A file that another process opened, maybe on another machine; opened here when it is first read."""

    def __init__(
        self,
        path: str,
        place: str,
        tensors: dict[str, TensorInfo],
        metadata: dict[str, str],
        identity: tuple[Any, ...],
    ) -> None:
        self.path, self._opened_at, self.tensors, self.metadata = path, place, tensors, metadata
        self._identity = identity
        self._file: SafetensorsFile | None = None

    def check_unchanged(self) -> None:
        self._opened().check_unchanged()

    def read(
        self, name: str, first: int = 0, last: int | None = None, *, kept: Buffers | None = None
    ) -> npt.NDArray[np.uint8]:
        return self._opened().read(name, first, last, kept=kept)

    def prefetch(self, rows: Iterable[tuple[str, int, int | None]]) -> None:
        self._opened().prefetch(rows)

    def _opened(self) -> SafetensorsFile:
        if self._file is None:
            try:
                file = SafetensorsFile(self._opened_at)
            except AuditError as error:
                error.path = self.path
                if isinstance(error.__context__, OSError):  # the file may be sound, and out of reach from here
                    error.what += f" on node {socket.gethostname()}"
                    error.do = "the files must be on storage that all nodes see"
                raise
            file.path = self.path
            if file.source.identity[1:] != self._identity[1:]:  # another mount may have other inode numbers
                raise AuditError(
                    f"not the file that was opened first, on node {socket.gethostname()}",
                    path=self.path,
                    wanted="one file for all nodes, that nobody writes to",
                )
            self._file = file
        return self._file


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate name '{next(name for name in names if names.count(name) > 1)}'")
    return result


def row_blocks(rows: int, width: int, tokens: int) -> Iterator[tuple[int, int]]:
    """Consecutive row ranges of about `tokens` padded positions each."""
    step = max(1, tokens // max(1, width))
    for first in range(0, rows, step):
        yield first, min(rows, first + step)
