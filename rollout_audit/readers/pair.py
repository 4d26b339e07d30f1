"""Two files that hold one batch: rollout values in one, train values in the other, rows matched by order or uid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout_audit.batch import Batch
from rollout_audit.errors import AuditError
from rollout_audit.readers.dump import Dump, note_mask, open_dump
from rollout_audit.readers.fields import listing, missing, parse_overrides
from rollout_audit.readers.safetensors_file import allow_open_files, row_blocks


@dataclass
class DumpPair:
    """Rows of `rollout` against the rows of `train` that they are matched with."""

    rollout: Dump
    train: Dump
    train_row_of: Tensor | None = None
    """Row of `train` for each row of `rollout`; None for the same row."""

    @property
    def path(self) -> str:
        return self.rollout.path

    @property
    def rows(self) -> int:
        return self.rollout.rows

    @property
    def width(self) -> int:
        return max(self.rollout.width, self.train.width)

    def check_unchanged(self) -> None:
        self.rollout.check_unchanged()
        self.train.check_unchanged()

    @property
    def num_bytes(self) -> int:
        return self.rollout.num_bytes + self.train.num_bytes

    def blocks(self, tokens: int) -> Iterator[tuple[int, int]]:
        return row_blocks(self.rows, self.width, tokens)

    def batch(self, first: int, last: int, device: str = "cpu") -> Batch:
        """Valid tokens of both sides; they may be padded differently, but not differ in length."""
        ours = self.rollout.batch(first, last, device, token_ids=True)
        theirs = self._train_batch(first, last, device)
        unequal = torch.nonzero(ours.lengths_B != theirs.lengths_B).reshape(-1)
        if unequal.numel():
            row = int(unequal[0])
            raise AuditError(
                f"{unequal.numel():,} of rows {first}..{last - 1} have another number of valid tokens than in "
                f"{self.train.path}",
                path=self.path,
                wanted=f"row {first + row}: {int(ours.lengths_B[row])} valid tokens",
                found=f"{int(theirs.lengths_B[row])}",
                do="give two files of the same sequences (--match uid if rows are in another order); "
                "several rank files as one batch are given as their folder",
            )
        ids_N, others_N = ours.token_ids_N, theirs.token_ids_N
        if ids_N is None:
            ids_N, others_N = others_N, None
        return replace(ours, old_N=theirs.old_N, token_ids_N=ids_N, other_token_ids_N=others_N)

    def _train_batch(self, first: int, last: int, device: str) -> Batch:
        if self.train_row_of is None:
            return self.train.batch(first, last, device, token_ids=True)
        rows = self.train_row_of[first:last].tolist()
        self.train.prefetch([(row, row + 1) for row in rows], token_ids=True)
        return join([self.train.batch(row, row + 1, device, token_ids=True) for row in rows])


def join(batches: list[Batch]) -> Batch:
    """Batches of single rows as one."""

    def cat(values: list[Tensor | None]) -> Tensor | None:
        known = [x_N for x_N in values if x_N is not None]
        return torch.cat(known) if len(known) == len(values) else None

    return replace(
        batches[0],
        lengths_B=torch.cat([batch.lengths_B for batch in batches]),
        columns_N=torch.cat([batch.columns_of_all() for batch in batches]),
        old_N=cat([batch.old_N for batch in batches]),
        rollout_N=cat([batch.rollout_N for batch in batches]),
        token_ids_N=cat([batch.token_ids_N for batch in batches]),
        num_not_binary=sum(batch.num_not_binary for batch in batches),
    )


_SHARED = ("response_mask", "attention_mask", "responses", "uid")
"""Fields that either side may have: what --field says of them is meant for the file that has the tensor."""


def open_pairs(
    rollout_paths: list[str],
    train_paths: list[str],
    rollout_fields: Iterable[str],
    train_fields: Iterable[str],
    match: str | None,
) -> list[DumpPair]:
    """Open both sides, each with its words of --field, and match files and rows."""
    allow_open_files(len(rollout_paths) + len(train_paths))
    shared = ("responses",) if match == "order" else ("responses", "uid")
    ours, theirs = parse_overrides(rollout_fields), parse_overrides(train_fields)
    rollouts = [open_dump(path, ("rollout_log_probs", *shared), ours, _SHARED) for path in rollout_paths]
    trains = [open_dump(path, ("old_log_probs", *shared), theirs, _SHARED) for path in train_paths]
    names = {name for dump in (*rollouts, *trains) for name in dump.file.tensors}
    for canonical, name in (ours | theirs).items():
        if name not in names:
            raise AuditError(
                f"no tensor '{name}', here or in {train_paths[0]}",
                path=rollout_paths[0],
                wanted=f"{name} (--field {canonical}={name})",
                found=listing(names),
            )
    return pair_dumps(rollouts, trains, match)


def pair_dumps(rollouts: list[Dump], trains: list[Dump], match: str | None) -> list[DumpPair]:
    """The n-th file of one side with the n-th of the other."""
    if len(rollouts) != len(trains):
        raise AuditError(
            f"{len(rollouts)} files on the rollout side, {len(trains)} on the train side",
            path=rollouts[0].path,
            wanted="the same number",
        )
    return [pair_dump(rollout, train, match) for rollout, train in zip(rollouts, trains, strict=True)]


def pair_dump(rollout: Dump, train: Dump, match: str | None) -> DumpPair:
    """Match the rows of two dumps: by `uid` where both have one (or it is asked for), else by order."""
    for dump, name in ((rollout, "rollout_log_probs"), (train, "old_log_probs")):
        if name not in dump.fields:
            key = "--rollout-key" if dump is rollout else "--actor-key"
            raise missing(name, dump.file.tensors, dump.path, f"if another tensor is it, say so: {key} NAME")
    both = "uid" in rollout.fields and "uid" in train.fields
    if match == "uid" and not both:
        lacking = train if "uid" in rollout.fields else rollout
        raise AuditError("no uid to match rows by", path=lacking.path, wanted="uid in both files", do="--match order")
    if rollout.rows != train.rows:
        raise AuditError(
            f"it has {rollout.rows:,} rows and {train.path} has {train.rows:,}",
            path=rollout.path,
            wanted="two files of the same sequences",
            do="several rank files as one batch are given as their folder",
        )
    pair = DumpPair(rollout, train, _by_uid(rollout, train) if both and match != "order" else None)
    if rollout.mask == "all" != train.mask or train.mask == "all" != rollout.mask:
        _share_mask(rollout, train, pair.train_row_of)
    for dump in (rollout, train):
        note_mask(dump)
    return pair


def _share_mask(rollout: Dump, train: Dump, train_row_of: Tensor | None) -> None:
    """A file without a mask takes the other's, row by matched row, for the same padding only."""
    has, lacks = (rollout, train) if train.mask == "all" else (train, rollout)
    if has.width != lacks.width:
        raise AuditError(
            "no mask, and another width than the file that has one",
            path=lacks.path,
            wanted=f"{has.width} columns ({has.path})",
            found=f"{lacks.width}",
        )
    lacks.notes.append(f"no mask: that of {has.path} was taken")
    lacks.mask_from = has
    if train_row_of is not None:
        lacks.mask_rows = train_row_of if lacks is rollout else torch.argsort(train_row_of)


def _by_uid(rollout: Dump, train: Dump) -> Tensor:
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, uid in enumerate(_uids(train)):
        places[uid].append(row)
    seen: dict[tuple[int, ...], int] = defaultdict(int)
    result, uids = [], _uids(rollout)
    for row, uid in enumerate(uids):
        if seen[uid] >= len(places[uid]):
            raise AuditError(
                f"row {row} has uid {_show(uid)}, and {train.path} has no {'further ' if seen[uid] else ''}row with it",
                path=rollout.path,
                wanted="the same uids in both files",
                do="--match order",
            )
        result.append(places[uid][seen[uid]])
        seen[uid] += 1
    if len(places) < len(uids):
        rollout.notes.append("rows share uids (samples of one prompt): the n-th row of a uid was matched with the n-th")
    return torch.tensor(result)


def _uids(dump: Dump) -> list[tuple[int, ...]]:
    return [tuple(row) for row in dump.read("uid", 0, dump.rows).reshape(dump.rows, -1).tolist()]


def _show(uid: tuple[int, ...]) -> str:
    return str(uid[0] if len(uid) == 1 else list(uid))
