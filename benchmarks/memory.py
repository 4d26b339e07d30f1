"""Anonymous memory above `import torch` while each command runs on a large dump; it should not grow with the file.

    python benchmarks/memory.py [--gb 2] [--row-tokens 1000000] [--threads 2]

Two dumps are made: many rows of 8,192 positions, and few rows of a million. Every command runs in a process of its own
that samples RssAnon of /proc/self/status (Linux), so file pages in the cache do not count.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

FIELDS = {
    "old_log_probs": ("F32", 4),
    "rollout_log_probs": ("F32", 4),
    "response_mask": ("U8", 1),
    "responses": ("I32", 4),
}
RULES = ["--rollout-rs", "token_k1,seq_max_k3", "--rollout-rs-threshold", "0.5_2.0,0.1"]
COMMANDS = {
    "is-metrics": ["is-metrics", "--quiet"],
    "is-metrics, two RS rules": ["is-metrics", "--quiet", *RULES],
    "debug-compare": ["debug-compare", "--quiet"],
    "diagnose": ["diagnose", "--quiet"],
    "inspect": ["inspect", "--quiet"],
}
_CHILD = """
import sys, threading, time
def anon():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024
if sys.argv[1] != "inspect":
    import torch
import rollout_audit.cli, rich.console, rich.table
base, peak, done = anon(), [0.0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anon())
threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
status = rollout_audit.cli.run(sys.argv[1:])
seconds = time.perf_counter() - start
done.set()
print(status, max(peak[0], anon()) - base, seconds)
"""


def make_dump(path: Path, rows: int, width: int) -> None:
    """A dump of any size, written block by block."""
    sizes = {name: rows * width * item for name, (_, item) in FIELDS.items()}
    header, offset = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": FIELDS[name][0], "shape": [rows, width], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    block = 1 << 22
    old = -random.exponential(size=block).astype("f4")
    values = {
        "old_log_probs": old,
        "rollout_log_probs": np.minimum(old + random.normal(0, 0.02, block).astype("f4"), 0),
        "response_mask": np.ones(block, "u1"),
        "responses": random.integers(0, 50_000, block).astype("i4"),
    }
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in sizes:
            for first in range(0, rows * width, block):
                file.write(values[name][: min(block, rows * width - first)].tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--row-tokens", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    tokens = int(arguments.gb * 1e9 / 13)
    shapes = {
        "many rows": (tokens // 8192, 8192),
        "huge rows": (max(4, tokens // 8 // arguments.row_tokens), arguments.row_tokens),
    }
    print(f"{'dump':<10} {'command':<26} {'GB':>6} {'MB above import torch':>22} {'seconds':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (rows, width) in shapes.items():
            path = Path(folder) / "dump.safetensors"
            make_dump(path, rows, width)
            for title, words in COMMANDS.items():
                threads = [] if words[0] == "inspect" else ["--threads", str(arguments.threads)]
                call = [sys.executable, "-c", _CHILD, words[0], str(path), *words[1:], *threads]
                answer = subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()
                assert answer[0] == "0"
                size = path.stat().st_size / 1e9
                print(
                    f"{name:<10} {title:<26} {size:6.2f} {float(answer[1]):22.0f} {float(answer[2]):8.2f}", flush=True
                )


if __name__ == "__main__":
    main()
