"""How the time of is-metrics grows: with the share of valid tokens, with size, and with a busy machine.

    python benchmarks/scaling.py [--threads 2] [--repeats 7]

Time should be linear in valid tokens (plus reading the bytes), and a background load should cost its share and no
more. Medians; `MB/s` counts the bytes that are read, `ns` is time a valid token.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from vs_verl import make_dump, ours

from rollout_audit.config import Settings


def median_ms(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def spin() -> None:
    torch.set_num_threads(1)
    x = torch.randn(512, 512)
    while True:
        x = (x @ x).clamp(-1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()

    def measure(path: Path, threads: int = arguments.threads) -> float:
        return median_ms(ours(path, "is-metrics", Settings(), threads), arguments.repeats)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.safetensors"
        print("share of valid tokens, 1024 x 4096 positions")
        for fill in (0.05, 0.1, 0.25, 0.5):
            make_dump(path, 1024, 4096, fill)
            took = measure(path)
            print(f"  {fill:6.0%} {took:8.1f} ms {1e6 * took / (fill * 1024 * 4096):7.1f} ns {37.7e3 / took:8.0f} MB/s")
        print("rows of 4096 positions, half of them valid")
        for rows in (64, 256, 1024, 4096):
            make_dump(path, rows, 4096, 0.5)
            took = measure(path)
            print(f"  {rows:6} {took:8.1f} ms {1e6 * took / (0.5 * rows * 4096):7.1f} ns")
        print("1024 x 4096, half valid, while other processes compute")
        make_dump(path, 1024, 4096, 0.5)
        for load in (0, 1, 2, 4):
            others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(load)]
            for process in others:
                process.start()
            time.sleep(3 if load else 0)
            print(f"  {load:6} {measure(path):8.1f} ms")
            for process in others:
                process.kill()


if __name__ == "__main__":
    main()
