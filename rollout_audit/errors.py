"""What the user can mend: one exception, one message format.

    AuditError("no response_mask", path="rank_3.safetensors", wanted="response_mask", found="old_log_probs",
               do="--field response_mask=NAME")

prints as

    rank_3.safetensors: no response_mask
      wanted: response_mask
      found:  old_log_probs
      do:     --field response_mask=NAME
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Text that shows its control characters as escapes: a name in a file may hold newlines and terminal codes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class AuditError(Exception):
    """Something the user can mend: a file, a field, an option. The command line exits with 2.

    `what` is one sentence without a final stop; `wanted`, `found` and `do` are optional lines below it.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str | None = None,
        wanted: str | None = None,
        found: str | None = None,
        do: str | None = None,
    ) -> None:
        self.what, self.path, self.wanted, self.found, self.do = what, path, wanted, found, do
        super().__init__(what)

    def __str__(self) -> str:
        lines = [printable(f"{self.path}: {self.what}" if self.path else self.what)]
        for name, text in (("wanted", self.wanted), ("found", self.found), ("do", self.do)):
            if text:
                lines.append(f"  {name + ':':<7} {printable(text)}")
        return "\n".join(lines)


class SettingError(AuditError, ValueError):
    """A setting that makes no sense; also a ValueError, which is what verl's functions raise for it."""
