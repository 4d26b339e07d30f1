"""--engine ray: groups of chunks as Ray tasks. Paths and row ranges go out, one small result a group comes back.

Ray does the scheduling, the retries and the transport. A result is a value that the driver takes once, in the order of
the groups: a task that ran twice because its worker was killed counts once.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

from rollout_audit.errors import AuditError
from rollout_audit.heap import keep_freed_memory

_RETRIES = 3
"""Times that Ray runs a task again whose worker or node has died; an error of ours is an answer and is not retried."""


def open_engine(
    name: str, address: str | None, threads: int, device: str = "cpu"
) -> AbstractContextManager[RayEngine | None]:
    """What --engine and the options that go with it ask for; None stands for threads of this process."""
    if name == "ray":
        if device != "cpu":
            raise AuditError(f"--device {device} with --engine ray", wanted="cpu: tasks of Ray compute there")
        return RayEngine(address, threads)
    if address is not None:
        raise AuditError("--ray-address without --engine ray", do="give both, or neither")
    return nullcontext()


class RayEngine:
    """Work on a Ray cluster, or on a Ray of our own that ends with the context; it starts when it is first used."""

    most_chunks = 256
    """As many in one task: about a second or two of work, so that starting tasks and merging states cost little."""

    def __init__(self, address: str | None = None, threads: int = 0) -> None:
        try:
            import ray
        except ImportError:
            raise AuditError("--engine ray: Ray is not installed here", do="pip install 'rollout-audit[ray]'") from None
        self.ray, self.threads, self.mine = ray, threads, False
        self.address = address or os.environ.get("RAY_ADDRESS") or "local"
        if threads and self.address != "local":
            raise AuditError(
                "--threads with a Ray cluster", wanted="a task for each CPU that it has", do="leave it out"
            )

    def __enter__(self) -> RayEngine:
        # Whatever log_to_driver says, Ray prints that a worker died on stdout, where results go.
        self.quiet = redirect_stdout(sys.stderr)
        self.quiet.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.mine:  # leaves the cluster, or ends the local Ray; never `ray stop`, which ends everybody's
            self.ray.shutdown()
            self.mine = False
        self.quiet.__exit__(None, None, None)

    def _start(self) -> None:
        if self.ray.is_initialized():
            return  # ours from before, or the caller's (a notebook, a trainer), which stays as it is
        options: dict[str, Any] = {"address": self.address}
        if self.address == "local":
            # Since 2.59 a local Ray wants a token and keeps it in the home folder, which may not be writable.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options |= {"num_cpus": self.threads or os.cpu_count() or 1, "include_dashboard": False}
        else:  # the nodes need torch and numpy; this package they get from here, so that its version is the same
            options["runtime_env"] = {"py_modules": [os.path.dirname(__file__)]}
        host, _, port = self.address.rpartition("/")[2].rpartition(":")
        try:
            if port.isdigit():  # Ray itself tries for minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            self.mine = True  # also if it is interrupted half way
            self.ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except (self.ray.exceptions.RayError, RuntimeError, ValueError, OSError) as exc:
            raise AuditError(
                f"--engine ray: cannot {'start' if self.address == 'local' else 'connect to'} Ray",
                wanted=f"a cluster at {self.address}" if self.address != "local" else None,
                found=" ".join(str(exc).split()) or type(exc).__name__,
                do="check --ray-address or RAY_ADDRESS; Ray and Python need the cluster's versions",
            ) from None

    @property
    def slots(self) -> int:
        """Tasks that run at a time."""
        self._start()
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def map(self, work: Callable[[Any], Any], groups: Sequence[Any]) -> Iterator[Any]:
        """Results in the order of the groups. Raises AuditError for what a worker could not read."""
        self._start()
        task = self.ray.remote(run_group).options(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")
        pending = deque(task.remote(work, group) for group in groups)
        try:
            while pending:
                result = self.ray.get(pending[0])
                pending.popleft()
                if isinstance(result, AuditError):
                    raise result
                yield result
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self.ray.exceptions.RayError as error:
            raise AuditError(
                "--engine ray: a task was lost or the cluster is gone",
                found=" ".join(f"{type(error).__name__}: {error}".split()),
                do="see the logs of Ray; --engine threads needs no cluster",
            ) from None
        finally:
            for ref in pending:
                self.ray.cancel(ref)


def run_group(work: Callable[[Any], Any], group: Any) -> Any:
    """On a worker. An AuditError is returned: raised, it would come back as one of Ray's, with a traceback in it."""
    import torch

    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        return work(group)
    except AuditError as error:
        return error
