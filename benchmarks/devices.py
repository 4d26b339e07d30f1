"""How fast a device is fed: is-metrics and debug-compare on the CPU and on it, in GB of read fields a second.

    python benchmarks/devices.py [--device cuda] [--threads 4] [--repeats 5]

The file is in the page cache. On cuda each worker thread has a stream, so copies overlap with compute; what is printed
includes reading, packing on the CPU, and the copy.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from vs_verl import make_dump

from rollout_audit.audit import audit, build_report
from rollout_audit.config import Settings
from rollout_audit.readers.dump import LOG_PROBS, open_dumps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.safetensors"
        make_dump(path, 4096, 8192, 0.37)
        print(f"4096 x 8192 positions, 37% valid, {arguments.threads} threads, torch {torch.__version__}")
        for command in ("is-metrics", "debug-compare"):
            for device in dict.fromkeys(("cpu", arguments.device)):
                times = []
                for _ in range(arguments.repeats + 1):
                    start = time.perf_counter()
                    dumps = open_dumps([str(path)], LOG_PROBS, [])
                    build_report(audit(command, dumps, Settings(), device=device, threads=arguments.threads))
                    times.append(time.perf_counter() - start)
                took = statistics.median(times[1:])
                print(f"  {command:<14} {device:<6} {1e3 * took:8.0f} ms {dumps[0].num_bytes / took / 1e9:7.2f} GB/s")


if __name__ == "__main__":
    main()
