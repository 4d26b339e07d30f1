"""--engine ray gives the report that threads give, on two nodes, whatever dies on the way."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_audit.audit import audit, build_report
from rollout_audit.cli import run
from rollout_audit.config import Settings, choose
from rollout_audit.engine_ray import RayEngine
from rollout_audit.errors import AuditError, SettingError
from rollout_audit.readers.dump import Dump, open_dumps
from rollout_audit.readers.fields import LOG_PROBS
from rollout_audit.readers.safetensors_file import SafetensorsFile
from rollout_audit.render.json_document import to_document
from tests.conftest import Cli
from tests.test_saving import assert_equal
from tests.web import serving

ROOT = Path(__file__).parent.parent
GOLDENS, STEP_7 = ROOT / "tests" / "goldens" / "verl", ROOT / "sample_data" / "step_7"
RULES = ["--rollout-rs", "token_k1,seq_max_k3", "--rollout-rs-threshold", "0.5_2.0,0.05"]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra [ray]"),
    # Ray's own: sockets and log files that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with one CPU each; this process is connected, as a notebook or a trainer would be."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or Cluster wants a token in the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes.add_node(num_cpus=1)
        ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups out of small files."""
    monkeypatch.setattr("rollout_audit.audit.CHUNK_TOKENS", 256)


def dumps(*paths: Path) -> list[Dump]:
    return open_dumps([str(path) for path in paths], LOG_PROBS, [])


def everything(sources: Sequence[Dump], engine: RayEngine | None) -> dict[str, Any]:
    settings = choose(None, rollout_rs="token_k1,seq_max_k3", rollout_rs_threshold="0.5_2.0,0.05")
    return to_document(build_report(audit("is-metrics", sources, settings, engine=engine)))


@pytest.mark.parametrize(
    "words",
    [
        ["is-metrics", STEP_7, *RULES],
        ["is-metrics", *sorted(GOLDENS.glob("*.safetensors")), *RULES],
        ["is-metrics", GOLDENS / "empty_row.safetensors", "--preset", "decoupled_geo_rs_token_tis"],
        ["debug-compare", STEP_7, "--top", "7"],
        ["diagnose", STEP_7],
        ["debug-compare", GOLDENS / "larger.safetensors", GOLDENS / "larger.safetensors"],
    ],
    ids=lambda words: "-".join(Path(word).name for word in words[:3]),
)
@pytest.mark.usefixtures("cluster", "small_chunks")
def test_the_report_is_that_of_threads(words: list[object], cli: Cli) -> None:
    local = cli(*words, "--json")
    on_ray = cli(*words, "--json", "--engine", "ray")
    assert (on_ray.status, on_ray.err) == (0, local.err), on_ray
    assert_equal(on_ray.document, local.document)


@pytest.mark.usefixtures("cluster")
def test_rows_matched_by_uid_travel_with_their_order(tmp_path: Path, cli: Cli) -> None:
    tensors = load_file(GOLDENS / "larger.safetensors")
    rows = len(tensors["responses"])
    backwards = torch.arange(rows).flip(0)
    save_file({**tensors, "uid": torch.arange(rows)}, tmp_path / "rollout.safetensors")
    save_file(
        {**{name: x[backwards].contiguous() for name, x in tensors.items()}, "uid": backwards},
        tmp_path / "train.safetensors",
    )
    words = ["debug-compare", tmp_path / "rollout.safetensors", tmp_path / "train.safetensors", "--json"]
    assert_equal(cli(*words, "--engine", "ray").document, cli(*words).document)


@pytest.mark.usefixtures("cluster", "small_chunks")
def test_a_url_is_opened_by_each_worker(cli: Cli) -> None:
    pytest.importorskip("aiohttp", reason="http:// needs aiohttp")
    with serving(ROOT / "sample_data") as web:
        words = ["is-metrics", f"{web.url}/healthy.safetensors", "--json"]
        local = cli(*words)
        assert local.status == 0, local.err
        before = web.gets
        assert_equal(cli(*words, "--engine", "ray").document, local.document)
        assert web.gets - before > 4


class Changed(RayEngine):
    """An engine whose work is wrapped on its way to the workers."""

    def __init__(self, wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
        super().__init__()
        self.wrap = wrap

    def map(self, work: Callable[[Any], Any], groups: Sequence[Any]) -> Iterator[Any]:
        assert len(groups) > 4
        return super().map(self.wrap(work), groups)


@pytest.mark.usefixtures("cluster", "small_chunks")
def test_a_killed_worker_loses_nothing_and_counts_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker, log = str(tmp_path / "killed"), tmp_path / "log"

    def deadly(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def once(group: Any) -> Any:  # a closure: Ray ships it by value
            result = work(group)
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\n")
            if group[0][2] > 0 and not os.path.exists(marker):  # in mid-run, after the work is done
                open(marker, "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return once

    sources = dumps(*sorted(STEP_7.glob("*.safetensors")))
    with Changed(deadly) as engine:
        assert_equal(everything(sources, engine), everything(sources, None))
    assert os.path.exists(marker), "no worker was killed"
    assert len(set(log.read_text().split())) > 1
    assert capsys.readouterr().out == "", "Ray says it on stderr"


@pytest.mark.usefixtures("cluster", "small_chunks")
def test_a_task_computes_with_one_thread(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def logging(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def where(group: Any) -> Any:
            import ray

            with open(log, "a") as file:
                file.write(f"{ray.get_runtime_context().get_node_id()} {torch.get_num_threads()}\n")
            return work(group)

        return where

    with Changed(logging) as engine:
        everything(dumps(*sorted(STEP_7.glob("*.safetensors"))), engine)
    lines = log.read_text().splitlines()
    assert len(lines) > 1
    assert {line.split()[1] for line in lines} == {"1"}  # on which nodes is Ray's to decide


@pytest.mark.usefixtures("cluster")
def test_a_file_that_a_worker_cannot_see_is_named_with_the_node(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.safetensors"
    path.write_bytes((GOLDENS / "larger.safetensors").read_bytes())
    sources = dumps(path)
    path.unlink()
    with RayEngine() as engine, pytest.raises(AuditError, match=r"no such file on node \S+") as caught:
        audit("debug-compare", sources, Settings(), engine=engine)
    assert type(caught.value) is AuditError
    assert caught.value.path == str(path)
    assert str(caught.value).endswith("do:     the files must be on storage that all nodes see")


@pytest.mark.usefixtures("cluster")
def test_with_keep_going_such_a_file_is_left_out_and_no_other(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank_{i}.safetensors" for i in range(3)]
    for path in paths:
        path.write_bytes((GOLDENS / "larger.safetensors").read_bytes())
    sources = dumps(*paths)
    paths[1].unlink()
    with RayEngine() as engine:
        state = audit("is-metrics", sources, choose(None), keep_going=True, engine=engine)
    assert [item["path"] for item in state.inputs] == [str(paths[0]), str(paths[2])]
    assert [text.splitlines()[0].split(" on node ")[0] for text in state.left_out] == [f"{paths[1]}: no such file"]


@pytest.mark.usefixtures("cluster")
def test_a_broken_file_is_the_same_message_as_locally(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.safetensors"
    path.write_bytes((GOLDENS / "larger.safetensors").read_bytes())
    sources = dumps(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AuditError) as here:
        SafetensorsFile(str(path))
    with RayEngine() as engine, pytest.raises(AuditError) as there:
        audit("debug-compare", sources, Settings(), engine=engine)
    assert str(there.value) == str(here.value)


@pytest.mark.usefixtures("cluster")
def test_a_fault_of_ours_keeps_its_type() -> None:
    def broken(_: Any) -> None:
        raise ZeroDivisionError("ours")

    with RayEngine() as engine, pytest.raises(ZeroDivisionError, match="^ours$"):
        list(engine.map(broken, [1]))


@pytest.mark.usefixtures("cluster")
def test_a_task_that_always_dies_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_audit.engine_ray._RETRIES", 0)

    def dies(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with RayEngine() as engine, pytest.raises(AuditError, match="a task was lost or the cluster is gone"):
        list(engine.map(dies, [1]))


def test_a_file_is_opened_again_by_its_absolute_path_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a.safetensors").write_bytes((GOLDENS / "ragged.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)
    here = dumps(Path("a.safetensors"))[0]
    raw = pickle.dumps(here)
    assert len(raw) < 3000, "paths travel, tensors do not"
    monkeypatch.chdir(tmp_path / "elsewhere")
    there = pickle.loads(raw)
    assert there.path == "a.safetensors"
    assert torch.equal(there.read("old_log_probs", 1, 3), here.read("old_log_probs", 1, 3))
    there.check_unchanged()
    (tmp_path / "a.safetensors").write_bytes((GOLDENS / "larger.safetensors").read_bytes())
    with pytest.raises(AuditError, match="a.safetensors: not the file that was opened first"):
        pickle.loads(raw).read("old_log_probs", 1, 3)


def test_an_error_crosses_processes_whole() -> None:
    error = SettingError("no mask", path="a", wanted="b", found="c", do="d")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (SettingError, str(error))


def test_without_ray_it_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    parts = cli("is-metrics", STEP_7, "--engine", "ray").message("--engine ray: Ray is not installed here")
    assert parts["do"] == "pip install 'rollout-audit[ray]'"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--ray-address", "x:1"], "--ray-address without --engine ray"),
        (["--engine", "ray", "--ray-address", "x:1", "--threads", "2"], "--threads with a Ray cluster"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], what: str, cli: Cli) -> None:
    cli("is-metrics", STEP_7, *words).message(what)


def test_a_cluster_that_does_not_answer_is_one_message_at_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        parts = cli("is-metrics", STEP_7, "--engine", "ray", "--ray-address", address).message("--engine ray: cannot")
    assert parts["wanted"] == f"a cluster at {address}"


def command(*words: object) -> list[str]:
    code = "import sys; from rollout_audit.cli import run; sys.exit(run(sys.argv[1:]))"
    return [sys.executable, "-c", code, *map(str, words)]


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | more


def test_a_local_ray_starts_and_ends_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the home folder cannot be written to, which is where Ray puts its token."""
    words = ["is-metrics", STEP_7, *RULES, "--json"]
    done = subprocess.run(
        command(*words, "--engine", "ray", "--threads", 2),
        env=environment(HOME=str(tmp_path / "nowhere")),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert run([str(word) for word in words]) == 0
    assert_equal(json.loads(done.stdout), json.loads(capsys.readouterr().out))


def test_a_cluster_is_reached_by_its_address_and_left_running(cluster: Any) -> None:
    done = subprocess.run(
        command("is-metrics", STEP_7, "--quiet", "--engine", "ray"),
        env=environment(RAY_ADDRESS=cluster.address, RAY_AUTH_MODE="disabled"),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert all(node.remaining_processes_alive() for node in cluster.list_all_nodes())
