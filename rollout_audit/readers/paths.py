"""Words of the command line to files: files, folders and globs, in natural order, each file once."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator

from rollout_audit.errors import AuditError
from rollout_audit.readers.remote import expand, is_url, no_dumps

SUFFIX = ".safetensors"


def natural_key(path: str) -> list[tuple[int, int | str]]:
    """Sorts step_9 before step_10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", path) if part]


def find_dumps(words: Iterable[str]) -> list[str]:
    """Files of these words, local or remote, in natural order.

    Raises AuditError for a word that leads to nothing: no such file, a folder without dumps, a pattern without match.
    """
    found: dict[object, str] = {}
    for word in words:
        for path in sorted(_expand(word), key=natural_key):
            found.setdefault(_same_file(path), path)
    return sorted(found.values(), key=natural_key)


def _same_file(path: str) -> object:
    """Equal for two names of one file, links of both kinds included."""
    if not is_url(path):
        try:
            status = os.stat(path)
            return status.st_dev, status.st_ino
        except OSError:
            pass  # opening it will say why
    return path


def _expand(word: str) -> list[str]:
    if not word:
        raise AuditError("an empty file name", wanted="a file, folder or glob", do="is a shell variable not set?")
    if word == "-":
        raise AuditError("standard input cannot be read", path=word, do="save it to a file first")
    if is_url(word):
        return expand(word, SUFFIX)
    if os.path.isdir(word):
        inside = list(_files_below(word))
        dumps = [path for path in inside if path.endswith(SUFFIX)]
        if not dumps:
            raise no_dumps(word, inside, SUFFIX)
        return dumps
    if os.path.lexists(word):
        return [word]
    if matches := glob.glob(word, recursive=True):
        return [path for match in matches for path in (_expand(match) if os.path.isdir(match) else [match])]
    kind = "no file matches this pattern" if glob.has_magic(word) else "no such file"
    nearby = _nearby(word)
    raise AuditError(kind, path=word, found=f"beside it: {', '.join(nearby)}" if nearby else None)


def _files_below(folder: str) -> Iterator[str]:
    """Every file below, through links too, each folder once. Raises AuditError for a folder that cannot be listed."""

    def refuse(exc: OSError) -> None:
        raise AuditError(f"cannot be listed: {exc.strerror}", path=str(exc.filename))

    seen: set[str] = set()
    for here, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if os.path.realpath(here) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(here))
        yield from (os.path.join(here, name) for name in names)


def _nearby(word: str) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(os.path.dirname(word) or ".") if name.endswith(SUFFIX))
    except OSError:
        return []
    return names[:5] + (["..."] if len(names) > 5 else [])
