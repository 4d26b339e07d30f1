"""A dump: an open file whose fields are known and fit together, cut into batches of whole rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout_audit.batch import Batch
from rollout_audit.errors import AuditError
from rollout_audit.readers.fields import LOG_PROBS, WEIGHTS, listing, missing, parse_overrides, resolve
from rollout_audit.readers.remote import is_url
from rollout_audit.readers.safetensors_file import (
    FLOATS,
    Buffers,
    SafetensorsFile,
    TensorInfo,
    allow_open_files,
    row_blocks,
)

DTYPES = {
    "BOOL": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_WIDENED = {"U16": "<u2", "U32": "<u4", "U64": "<u8"}
"""torch has next to no operations on these: they are read as int64."""
_SAMPLED_ROWS = 16
_BUFFERS = Buffers()


@dataclass(frozen=True)
class Field:
    """A tensor of the file and the canonical field it is."""

    info: TensorInfo
    why: str

    @property
    def width(self) -> int:
        return self.info.shape[1]


@dataclass
class Dump:
    """One file, ready to be read in chunks."""

    file: SafetensorsFile
    fields: dict[str, Field]
    mask: str
    """Where valid tokens come from: response_mask, attention_mask, or "all"."""
    notes: list[str] = field(default_factory=list)
    mask_from: Dump | None = None
    """Another file of the same sequences whose mask stands in for a missing one."""
    mask_rows: Tensor | None = None
    """Row of `mask_from` for each row; None for the same row."""

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def values(self) -> Field:
        """A field with one number a token: gives rows and width."""
        return next(self.fields[name] for name in (*LOG_PROBS, *WEIGHTS, "responses") if name in self.fields)

    @property
    def rows(self) -> int:
        return self.values.info.shape[0]

    @property
    def width(self) -> int:
        return self.values.width

    def check_unchanged(self) -> None:
        """Raises AuditError if the file was written to or replaced since it was opened."""
        self.file.check_unchanged()

    @property
    def num_bytes(self) -> int:
        """Bytes that will be read, but for a few token ids."""
        return sum(f.info.row_bytes * self.rows for name, f in self.fields.items() if name not in ("responses", "uid"))

    def blocks(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Row ranges of about so many valid tokens, as a few rows of the mask let expect; at most 4 times as wide."""
        if self.rows * self.width > tokens:
            tokens = int(tokens / max(0.25, self.fill()))
        return row_blocks(self.rows, self.width, tokens)

    def fill(self) -> float:
        """Share of valid tokens in a few rows, spread over the file."""
        if self.mask == "all" or not self.rows * self.width:
            return 1.0
        rows = range(0, self.rows, max(1, self.rows // _SAMPLED_ROWS))
        self.file.prefetch([(self.fields[self.mask].info.name, row, row + 1) for row in rows])
        counts = [int(torch.count_nonzero(self.read_mask(row, row + 1))) for row in rows]
        return sum(counts) / (len(counts) * self.width)

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Rows first..last-1 of a canonical field, [rows, its width], in the file's dtype (bool as uint8).

        In memory that the next read of this field overwrites: a Batch copies what it selects.
        """
        info = self.fields[name].info
        raw = self.file.read(info.name, first, last, kept=_BUFFERS)
        shape = (last - first, *info.shape[1:])
        if info.dtype in _WIDENED:
            return torch.from_numpy(raw.view(_WIDENED[info.dtype]).astype("i8")).reshape(shape)
        if not raw.size:
            return torch.empty(shape, dtype=DTYPES[info.dtype])  # a view of nothing has no stride to be taken as floats
        return torch.from_numpy(raw).view(DTYPES[info.dtype]).reshape(shape)

    def prefetch(self, rows: Iterable[tuple[int, int]], *, token_ids: bool = False) -> None:
        """Tell which row ranges this thread takes as batches next.

        Of a remote file all their fields come in one go; the next chunks are fetched meanwhile by the other workers.
        """
        left = ("uid",) if token_ids else ("uid", "responses")
        names = [f.info.name for canonical, f in self.fields.items() if canonical not in left]
        self.file.prefetch([(name, first, last) for first, last in rows for name in names])

    def read_mask(self, first: int, last: int) -> Tensor:
        """The mask [rows, T]: the last T columns of a wider one, ones where there is none."""
        if self.mask_from is not None:
            if self.mask_rows is None:
                return self.mask_from.read_mask(first, last)
            rows = self.mask_rows[first:last].tolist()
            return torch.cat([self.mask_from.read_mask(row, row + 1).clone() for row in rows])
        if self.mask == "all":
            return torch.ones(last - first, self.width, dtype=torch.int64)
        return self.read(self.mask, first, last)[:, -self.width :] if self.width else self.read(self.mask, first, last)

    @property
    def mask_dtype(self) -> torch.dtype:
        """As torch would load it, which decides the precision of verl's denominators."""
        if self.mask == "all":
            return torch.int64
        dtype = self.fields[self.mask].info.dtype
        return torch.bool if dtype == "BOOL" else DTYPES[dtype]

    def batch(self, first: int, last: int, device: str = "cpu", *, token_ids: bool = False) -> Batch:
        """Valid tokens of rows first..last-1; without `token_ids` an id is read when it is asked for."""
        self.prefetch([(first, last)], token_ids=token_ids)
        per_token = (*LOG_PROBS, *WEIGHTS, *(("responses",) if token_ids else ()))
        padded = {name: self.read(name, first, last) for name in per_token if name in self.fields}
        batch = Batch.from_padded(
            padded,
            self.read_mask(first, last),
            device=device,
            mask_dtype=self.mask_dtype,
            path=self.path,
            first_row=first,
        )
        if "responses" in self.fields and not token_ids:
            batch.read_row_ids = self.row_ids
        return batch

    def row_ids(self, row: int) -> Tensor:
        """`responses` [T] of one row."""
        return self.read("responses", row, row + 1)[0]

    def describe(self) -> dict[str, Any]:
        """Fields for the report: name in the file, dtype, shape."""
        return {
            name: {"name": f.info.name, "dtype": f.info.dtype, "shape": list(f.info.shape)}
            for name, f in self.fields.items()
        }


def open_dump(
    path: str, wanted: Iterable[str], overrides: dict[str, str], optional: Iterable[str] = (), *, masks: bool = True
) -> Dump:
    """Open a file and find the wanted canonical fields that it has, and its masks unless they do not matter.

    Raises AuditError where a field is ambiguous, has another shape or dtype, or where no field is there at all. An
    override of an `optional` field is left aside where the file has no such tensor.
    """
    file = SafetensorsFile(path)
    path = file.path
    names, wanted = list(file.tensors), list(wanted)
    overrides = {name: tensor for name, tensor in overrides.items() if tensor in names or name not in optional}
    fields: dict[str, Field] = {}
    for canonical, tensor in overrides.items():
        if tensor not in names:
            resolve(canonical, names, overrides, path)  # a misspelt name is said, also of a field that is not read
    for canonical in dict.fromkeys([*wanted, *(("response_mask", "attention_mask") if masks else ())]):
        if (found := resolve(canonical, names, overrides, path)) is not None:
            fields[canonical] = Field(file.tensors[found[0]], found[1])
    usable = [name for name in wanted if name in (*LOG_PROBS, *WEIGHTS)]
    if not any(name in fields for name in usable):
        raise AuditError(
            f"no {' and no '.join(usable)}",
            path=path,
            wanted=" or ".join(usable),
            found=listing(names),
            do=f"if they have other names, say so: --field {usable[0]}=NAME",
        )
    for used_twice in _same_tensor(fields):
        raise AuditError(f"one tensor is used as {used_twice}", path=path, do="check --field")
    mask = next((name for name in ("response_mask", "attention_mask") if name in fields), "all")
    if mask == "response_mask":
        fields.pop("attention_mask", None)
    dump = Dump(file, fields, mask)
    _check(dump)
    _note_names(dump)
    return dump


def _same_tensor(fields: dict[str, Field]) -> Iterator[str]:
    names: dict[str, str] = {}
    for canonical, f in fields.items():
        if f.info.name in names:
            yield f"{names[f.info.name]} and as {canonical} ({f.info.name})"
        names[f.info.name] = canonical


def _check(dump: Dump) -> None:
    for canonical, f in dump.fields.items():
        info = f.info
        if canonical != "uid" and len(info.shape) != 2:
            raise AuditError(
                f"{info.name} has shape {list(info.shape)}", path=dump.path, wanted="[sequences, tokens], padded"
            )
        if canonical in (*LOG_PROBS, *WEIGHTS) and info.dtype not in FLOATS:
            raise AuditError(
                f"{info.name} is {info.dtype}",
                path=dump.path,
                wanted=" or ".join(FLOATS),
                do=f"if it is not {canonical}, say which tensor is: --field {canonical}=NAME",
            )
        if info.dtype not in DTYPES:
            raise AuditError(f"{info.name} is {info.dtype}", path=dump.path, wanted=" or ".join(DTYPES))
    shape = dump.values.info.shape
    for canonical, f in dump.fields.items():
        other = f.info.shape
        if canonical == "uid":
            fits = len(other) in (1, 2) and other[0] == shape[0]
        elif canonical == dump.mask:
            # verl's debug metrics take the last columns of a mask over prompt and response.
            fits = other[0] == shape[0] and other[1] >= shape[1]
        else:
            fits = other == shape
        if not fits:
            raise AuditError(
                "shapes differ",
                path=dump.path,
                wanted=f"{list(shape)} ({dump.values.info.name})",
                found=f"{list(other)} ({f.info.name})",
            )


def _note_names(dump: Dump) -> None:
    for canonical, f in dump.fields.items():
        if f.info.name != canonical:
            dump.notes.append(f"{f.info.name} was taken for {canonical} ({f.why})")


def require_mask(dump: Dump) -> None:
    """is-metrics counts valid tokens only where a mask says so, of the log-probs' own shape."""
    if dump.mask == "all":
        raise missing(
            "response_mask",
            dump.file.tensors,
            dump.path,
            do="say which tensor it is: --field response_mask=NAME; if no row is padded: --all-tokens",
        )
    mask = dump.fields[dump.mask]
    if dump.mask == "response_mask" and mask.width != dump.width:
        raise AuditError(
            "shapes differ",
            path=dump.path,
            wanted=f"{list(dump.values.info.shape)} ({dump.values.info.name})",
            found=f"{list(mask.info.shape)} ({mask.info.name})",
            do=f"a mask over prompt and response can be taken as one: --field attention_mask={mask.info.name}",
        )
    note_mask(dump)


def note_mask(dump: Dump) -> None:
    """Say where valid tokens come from, when it is not a response mask."""
    if dump.mask == "attention_mask":
        dump.notes.append(
            f"no response_mask: the last {dump.width} columns of {dump.fields[dump.mask].info.name} were taken, which "
            "counts tool and padding-like tokens that a response mask leaves out"
        )
    elif dump.mask == "all" and dump.mask_from is None:
        dump.notes.append("no response_mask and no attention_mask: every position was counted, padding too")


def open_dumps(
    paths: Iterable[str],
    wanted: Iterable[str],
    fields: Iterable[str],
    *,
    masks: bool = True,
    left_out: list[str] | None = None,
) -> list[Dump]:
    """Open every file; `fields` are the words of --field.

    With `left_out`, a file that cannot be used is skipped and its message goes there, unless none can be used.
    """
    overrides, paths, wanted = parse_overrides(fields), list(paths), list(wanted)
    allow_open_files(len(paths))

    def open_one(path: str) -> Dump | AuditError:
        try:
            dump = open_dump(path, wanted, overrides, masks=masks)
            if masks and "rollout_is_weights" in wanted:
                require_mask(dump)
            return dump
        except AuditError as error:
            return error

    dumps: list[Dump] = []
    with ThreadPoolExecutor(16) as pool:  # opening a remote file is mostly waiting
        opened = pool.map(open_one, paths) if any(map(is_url, paths)) else map(open_one, paths)
        for number, dump in enumerate(opened, 1):
            if isinstance(dump, Dump):
                dumps.append(dump)
            elif left_out is None or (number == len(paths) and not dumps):
                raise dump
            else:
                left_out.append(str(dump))
    return dumps


def check_alike(dumps: list[Dump], needs_pair: str) -> None:
    """Files of one batch hold the same fields; `needs_pair` names who cannot do without both log-probs."""
    for dump in dumps:
        lacking = [name for name in LOG_PROBS if name not in dump.fields]
        if needs_pair and lacking:
            raise missing(
                lacking[0],
                dump.file.tensors,
                dump.path,
                f"{needs_pair} needs both log-probs; if another tensor is it, say so: --field {lacking[0]}=NAME",
            )
        if "old_log_probs" in lacking and "rollout_is_weights" not in dump.fields:
            raise missing("old_log_probs", dump.file.tensors, dump.path)
        for name in (*LOG_PROBS, *WEIGHTS):
            if (name in dump.fields) != (name in dumps[0].fields):
                has, lacks = (dump, dumps[0]) if name in dump.fields else (dumps[0], dump)
                raise AuditError(
                    f"no {name}, which {has.path} has",
                    path=lacks.path,
                    wanted="the same fields in every file of a batch",
                    found=listing(lacks.file.tensors),
                )
