"""How long the audit takes against verl 0.9.1's own functions: same file, same number of threads, ratios.

    pip install verl==0.9.1          # in an environment of its own; with this package beside it: pip install .
    python benchmarks/vs_verl.py [--threads 2] [--repeats 7] [--quick]

Each pair is timed in turn, repeat by repeat, so that a busy machine slows both; the ratio of the medians is what
counts. Both sides read the file each time: verl through safetensors' load_file, which is what its users would do.
verl answers its metrics only; the audit computes the audited values too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollout_audit.audit import audit, build_report
from rollout_audit.config import SUPPORTED_ROLLOUT_RS_OPTIONS, Settings
from rollout_audit.readers.dump import LOG_PROBS, WEIGHTS, open_dumps

ALL_RULES = {
    "rollout_rs": ",".join(SUPPORTED_ROLLOUT_RS_OPTIONS),
    "rollout_rs_threshold": ",".join("0.5_2.0" if "k1" in option else "0.1" for option in SUPPORTED_ROLLOUT_RS_OPTIONS),
}
TWO_RULES = {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.5_2.0,0.1"}


def make_dump(path: Path, rows: int, width: int, fill: float) -> None:
    """Right-padded rows of random length with a mismatch of sd 0.02."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.empty(rows, width).exponential_(1.0, generator=generator)
    rollout = (old + 0.02 * torch.randn(rows, width, generator=generator)).clamp(max=0)
    lengths = (torch.rand(rows, generator=generator) * 2 * fill * width).clamp(1, width).long()
    mask = (torch.arange(width) < lengths[:, None]).to(torch.uint8)
    responses = torch.zeros(rows, width, dtype=torch.int32)
    save_file({"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask, "responses": responses}, path)


def ours(path: Path, command: str, settings: Settings, threads: int) -> Callable[[], Any]:
    wanted = (*LOG_PROBS, *WEIGHTS) if command == "is-metrics" else (*LOG_PROBS, "responses")

    def run() -> Any:
        dumps = open_dumps([str(path)], wanted, [])
        return build_report(audit(command, dumps, settings, threads=threads))

    return run


def verl_is(path: Path, **settings: Any) -> Callable[[], Any]:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    def run() -> Any:
        d = load_file(path)
        return compute_rollout_correction_and_rejection_mask(
            d["old_log_probs"], d["rollout_log_probs"], d["response_mask"], rollout_is="token", **settings
        )

    return run


def verl_debug(path: Path) -> Callable[[], Any]:
    from verl.protocol import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    return lambda: calculate_debug_metrics(DataProto.from_dict(tensors=load_file(path)))


def sum_of_bytes(path: Path) -> Callable[[], Any]:
    """The least there is to do: add up the three fields, in memory already."""
    fields = load_file(path)
    return lambda: [fields[name].sum() for name in ("old_log_probs", "rollout_log_probs", "response_mask")]


def compare(mine: Callable[[], Any], theirs: Callable[[], Any], repeats: int, threads: int) -> tuple[float, float]:
    """Median milliseconds of each, taken in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for side, (run, intra_op) in enumerate(((mine, 1), (theirs, threads))):
            torch.set_num_threads(intra_op)
            start = time.perf_counter()
            run()
            if repeat:  # the first is a warm-up
                times[side].append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one small shape")
    arguments = parser.parse_args()
    shapes = [(256, 2048, 0.37)] if arguments.quick else [(1024, 8192, 0.37), (64, 32768, 0.37), (8192, 512, 0.37)]
    print(f"torch {torch.__version__}, {arguments.threads} threads, median of {arguments.repeats}, milliseconds")
    print(f"{'shape':>12}  {'what':<28} {'verl 0.9.1':>10} {'audit':>8} {'ratio':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for rows, width, fill in shapes:
            path = Path(folder) / "dump.safetensors"
            make_dump(path, rows, width, fill)
            cases = {
                "is-metrics": (ours(path, "is-metrics", Settings(), arguments.threads), verl_is(path)),
                "is-metrics, two RS rules": (
                    ours(path, "is-metrics", Settings(**TWO_RULES), arguments.threads), verl_is(path, **TWO_RULES),
                ),
                "is-metrics, all 11 RS rules": (
                    ours(path, "is-metrics", Settings(**ALL_RULES), arguments.threads), verl_is(path, **ALL_RULES),
                ),
                "debug-compare": (ours(path, "debug-compare", Settings(), arguments.threads), verl_debug(path)),
            }  # fmt: skip
            for name, (mine, theirs) in cases.items():
                our_time, verl_time = compare(mine, theirs, arguments.repeats, arguments.threads)
                ratio = verl_time / our_time
                print(f"{f'{rows}x{width}':>12}  {name:<28} {verl_time:10.1f} {our_time:8.1f} {ratio:7.1f}")
            audits = [ours(path, command, Settings(), arguments.threads) for command in ("is-metrics", "debug-compare")]
            both, least = compare(
                lambda audits=audits: [audit() for audit in audits],
                sum_of_bytes(path),
                arguments.repeats,
                arguments.threads,
            )
            print(f"{'':>12}  is-metrics and debug-compare take {both / least:.1f} times torch's sums of the fields")


if __name__ == "__main__":
    main()
