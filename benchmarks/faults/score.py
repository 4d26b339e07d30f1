"""How often `diagnose` is right on a labelled set: by code, by strength, and its false alarms.

    python benchmarks/faults/score.py DIR [--verbose]

DIR holds a manifest.json (make.py writes it): files with their labels. A faulty file is right when its first error or
warning is a label and no other error or warning fires but labels and allowed consequences; a healthy one when none
fires.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rollout_audit.audit import audit
from rollout_audit.config import Settings
from rollout_audit.diagnosing import build_diagnosis
from rollout_audit.diagnosis.magnitude import load_bands
from rollout_audit.readers.dump import LOG_PROBS, WEIGHTS, open_dumps
from rollout_audit.readers.paths import find_dumps
from rollout_audit.report import Report


def report_on(path: Path) -> Report:
    dumps = open_dumps(find_dumps([str(path)]), (*LOG_PROBS, *WEIGHTS, "responses"), [])
    return build_diagnosis(audit("diagnose", dumps, Settings(), threads=1), load_bands("dense"))


def judge(entry: dict[str, Any], codes: list[str]) -> tuple[bool, bool]:
    """Whether the first finding is a label, and whether nothing else fires."""
    labels = entry["labels"]
    allowed = {*labels, *entry.get("also_allowed", [])}
    first = bool(codes) and codes[0] in labels if labels else not codes
    return first, all(code in allowed for code in codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print every file that is not right")
    parser.add_argument("--only", help="only files with this label (healthy for none)")
    arguments = parser.parse_args()
    entries = json.loads((arguments.folder / "manifest.json").read_text())
    right: dict[str, Counter[str]] = defaultdict(Counter)
    by_strength: dict[str, Counter[str]] = defaultdict(Counter)
    confused: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        label = "+".join(entry["labels"]) if len(entry["labels"]) < 2 else "two faults"
        label = label or "healthy"
        if arguments.only and arguments.only != label:
            continue
        report = report_on(arguments.folder / entry["file"])
        codes = [f.code for f in report.findings if f.severity in ("error", "warning")]
        first, only = judge(entry, codes)
        outcome = "right" if first and only else "first" if first else "wrong"
        right[label][outcome] += 1
        by_strength[f"{label} {entry.get('strength') or ''}"][outcome] += 1
        if not first:
            confused[label, codes[0] if codes else "nothing"] += 1
        if arguments.verbose and outcome != "right":
            shown = {k: entry.get(k) for k in ("file", "labels", "variant", "strength", "rows", "tokens", "mean_abs_d")}
            print(f"{outcome}: {codes} {shown}")
    faulty = [c for label, c in right.items() if label != "healthy"]
    print(f"{'label':<22} {'right':>6} {'first':>6} {'wrong':>6}   (first: right first finding, but another fires too)")
    for label, counts in sorted(right.items()):
        print(f"{label:<22} {counts['right']:6} {counts['first']:6} {counts['wrong']:6}")
    total = sum(sum(c.values()) for c in faulty)
    if total:
        hits, named = sum(c["right"] for c in faulty), sum(c["right"] + c["first"] for c in faulty)
        print(f"faulty: {hits / total:.1%} right, {named / total:.1%} with the right first finding, of {total}")
    healthy = right.get("healthy", Counter())
    print(f"healthy: {healthy['wrong'] + healthy['first']} false alarms in {sum(healthy.values())}")
    print("taken for another: " + ", ".join(f"{a} as {b} {n}" for (a, b), n in confused.most_common()))
    print("by strength: " + ", ".join(
        f"{name.strip()} {c['right'] + c['first']}/{sum(c.values())}" for name, c in sorted(by_strength.items())
        if name.strip().endswith(("weak", "medium", "strong"))
    ))  # fmt: skip


if __name__ == "__main__":
    main()
