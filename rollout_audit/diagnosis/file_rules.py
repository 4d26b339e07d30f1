"""What is wrong with the set of files: some could not be read, or a step is not whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollout_audit.report import Finding

_MOST = 10
"""Sentences that a finding quotes."""


def file_findings(left_out: Sequence[str], incomplete: Sequence[str]) -> Iterator[Finding]:
    """Files that --keep-going left out, and steps with a rank or a marker missing."""
    if left_out:
        yield Finding(
            "left-out",
            "error",
            f"{len(left_out):,} files could not be read and are not in these numbers",
            {"files": len(left_out)},
            [{"file": message} for message in left_out[:_MOST]],
            "mend or remove them, and run again without --keep-going",
        )
    if incomplete:
        yield Finding(
            "incomplete-steps",
            "warning",
            f"not whole: {incomplete[0]}" + (f"; {len(incomplete) - 1:,} more" if len(incomplete) > 1 else ""),
            {"steps": len(incomplete)},
            [{"lacks": sentence} for sentence in incomplete[:_MOST]],
            "wait until the step is written, or find out why the rank did not write",
        )
