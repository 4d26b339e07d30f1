"""Remote files: what local files give, from few bytes, and one message for each fault.

The servers are real ones, on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_audit.readers import remote
from rollout_audit.readers.paths import find_dumps
from rollout_audit.readers.remote import RemoteBytes, is_url, without_secrets
from tests.conftest import Cli, Write, small
from tests.test_cli import imported_by
from tests.test_goldens import VERL
from tests.web import Web, serving

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

SAMPLES = Path(__file__).parent.parent / "sample_data"
SAMPLE = SAMPLES / "healthy.safetensors"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    pytest.importorskip("aiohttp", reason="http:// needs aiohttp")
    with serving(tmp_path) as web:
        yield web


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    pytest.importorskip("s3fs", reason="s3:// needs s3fs")
    server = pytest.importorskip("moto.server", reason="the S3 server of these tests is moto's").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket with the samples below run/, and another file."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    fs.clear_instance_cache()  # one of an earlier test may have another server's address
    if not fs.exists("bucket"):
        fs.mkdir("bucket")
        for path in sorted((SAMPLES / "step_7").iterdir()):
            fs.put(str(path), f"bucket/run/step_7/{path.name}")
        for number in (10, 9):
            fs.put(str(SAMPLE), f"bucket/many/step_{number}.safetensors")
        fs.pipe("bucket/many/notes.txt", b"notes")
        fs.pipe("bucket/nothing/notes.txt", b"notes")
    return "s3://bucket"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_WAITS", (0.0, 0.01, 0.01))


def same_but_for_paths(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    def plain(document: dict[str, Any]) -> str:
        for item in document["inputs"]:
            item["path"] = item["path"].rsplit("/", 1)[-1]
        for item in document.get("worst_tokens", []):
            item["path"] = item["path"].rsplit("/", 1)[-1]
        return json.dumps({**document, "notes": []})

    return plain(ours) == plain(theirs)


COMMANDS = ["is-metrics", "debug-compare", "diagnose", "inspect"]


# The same numbers


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_on_the_web_gives_the_report_of_the_local_one(command: str, web: Web, cli: Cli) -> None:
    web.folder = SAMPLES
    ours, theirs = cli(command, f"{web.url}/{SAMPLE.name}", "--json"), cli(command, SAMPLE, "--json")
    assert ours.document["inputs"][0]["path"] == f"{web.url}/{SAMPLE.name}"
    assert same_but_for_paths(ours.document, theirs.document)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_on_s3_gives_the_report_of_the_local_one(command: str, bucket: str, cli: Cli) -> None:
    ours = cli(command, f"{bucket}/run/step_7", "--json")
    assert same_but_for_paths(ours.document, cli(command, SAMPLES / "step_7", "--json").document)


def test_every_file_system_gives_the_same_numbers(cli: Cli) -> None:
    here = cli("is-metrics", SAMPLE, "--json").document
    fsspec.filesystem("memory").pipe("/run/healthy.safetensors", SAMPLE.read_bytes())
    for url in ("memory://run/healthy.safetensors", f"file://{SAMPLE.resolve()}", "memory://run", "MEMORY://run/*.s*"):
        assert same_but_for_paths(cli("is-metrics", url, "--json").document, here), url


def test_many_chunks_in_many_threads_give_the_same_numbers(
    web: Web, cli: Cli, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_audit.audit.CHUNK_TOKENS", 3 * 64)
    torch.manual_seed(0)
    rollout, ones, uid = -torch.rand(100, 64), torch.ones(100, 64, dtype=torch.int64), torch.randperm(100)
    old = rollout + 0.1 * torch.randn(100, 64)
    write(rollout_log_probs=rollout, old_log_probs=old, response_mask=ones, responses=ones, uid=uid)
    write("other.safetensors", rollout_log_probs=None, old_log_probs=old, response_mask=ones, responses=None,
          uid=uid.flip(0))  # fmt: skip
    words = ("--json", "--threads", "4")
    ours, theirs = (cli("is-metrics", f"{where}dump.safetensors", *words).document for where in (f"{web.url}/", ""))
    assert same_but_for_paths(ours, theirs)
    ours, theirs = (
        cli("debug-compare", f"{where}dump.safetensors", f"{where}other.safetensors", *words).document
        for where in (f"{web.url}/", "")
    )
    assert same_but_for_paths(ours, theirs)
    assert ours["metrics"] == theirs["metrics"]


def test_states_are_merged_from_s3(bucket: str, cli: Cli, tmp_path: Path) -> None:
    state = tmp_path / "a.state.safetensors"
    report = cli("is-metrics", SAMPLE, "--json", "--save-state", state).document
    fsspec.filesystem("s3").put(str(state), "bucket/states/a.safetensors")
    assert cli("merge", f"{bucket}/states", "--json").document["metrics"] == report["metrics"]


# Which files


def test_folders_and_globs_on_s3_come_in_natural_order(bucket: str) -> None:
    names = ["step_9.safetensors", "step_10.safetensors"]
    for word in ("many", "many/", "many/*.safetensors", "m*/step_*", "m*y"):
        assert find_dumps([f"{bucket}/{word}"]) == [f"{bucket}/many/{name}" for name in names], word
    assert len(find_dumps([bucket])) >= 4
    assert find_dumps([f"{bucket}/many/step_9.safetensors", f"{bucket}/many"])[0].endswith("step_9.safetensors")


def test_a_page_that_lists_files_is_a_folder(web: Web, write: Write) -> None:
    write("run/step_10.safetensors")
    write("run/step_9.safetensors")
    wanted = [f"{web.url}/run/step_9.safetensors", f"{web.url}/run/step_10.safetensors"]
    assert find_dumps([f"{web.url}/run/"]) == wanted
    assert find_dumps([f"{web.url}/run/*.safetensors"]) == wanted
    assert not any(path.endswith(".safetensors") for _, path, _ in web.requests)


def test_a_question_mark_in_a_web_address_is_no_pattern(web: Web, cli: Cli, write: Write) -> None:
    write()
    url = f"{web.url}/dump.safetensors?download=true&X-Amz-Signature=abcdef"
    document = cli("is-metrics", url, "--json").document
    assert document["inputs"][0]["path"] == f"{web.url}/dump.safetensors?download=true&X-Amz-Signature=***"


def test_what_is_no_url_stays_local() -> None:
    assert [word for word in ("s3://a", "HF://a", "gs://a/b*", "a://b") if not is_url(word)] == []
    assert [word for word in ("a", "a:b", "./s3://a", "/s3://", "://a", "1://a") if is_url(word)] == []


# How many bytes


def test_only_the_header_and_the_needed_fields_are_fetched(web: Web, cli: Cli, write: Write) -> None:
    path = write(junk=torch.zeros(2, 500_000), hidden=torch.zeros(100, 1_000, 8))
    needed = sum(x.numel() * x.element_size() for name, x in small().items() if name != "responses")
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert cli("is-metrics", f"{web.url}/{path}").status == 0
    assert web.bytes_sent == needed + header + 24 + 1  # the start, and one byte to see whether ranges are answered
    assert web.bytes_sent < path.stat().st_size / 1_000


def test_fields_of_a_chunk_come_together(web: Web, cli: Cli, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    calls: list[int] = []
    fs = fsspec.filesystem("http")
    cat_ranges = fs.cat_ranges

    def count(paths: list[str], *words: Any, **more: Any) -> Any:
        calls.append(len(paths))
        return cat_ranges(paths, *words, **more)

    monkeypatch.setattr(fs, "cat_ranges", count)
    assert cli("is-metrics", f"{web.url}/dump.safetensors").status == 0
    assert calls == [1, 1, 3]  # the header's length, the header, the fields


# Faults


def test_a_fault_that_passes_is_tried_again(web: Web, cli: Cli, write: Write) -> None:
    path = write()
    web.status, web.times = 503, 3
    assert cli("is-metrics", f"{web.url}/{path}").status == 0
    assert web.times == 0


def test_a_fault_that_stays_names_the_file_and_the_bytes(web: Web, cli: Cli, write: Write) -> None:
    path = write()
    remote_file = RemoteBytes(f"{web.url}/{path}")
    web.status, web.times = 503, 1_000
    before = web.gets
    with pytest.raises(Exception, match="bytes 1,000 to 1,009 cannot be read") as caught:
        remote_file.read_into(memoryview(bytearray(10)), 1_000)
    assert str(caught.value).startswith(f"{web.url}/{path}: ")
    assert "503" in str(caught.value)
    assert "(4 tries)" in str(caught.value)
    assert web.gets - before == 4
    assert cli("is-metrics", f"{web.url}/{path}").message(f"{web.url}/{path}: ")["do"].startswith("run again later")


def test_a_server_that_is_not_there_is_said(web: Web, cli: Cli) -> None:
    message = cli("is-metrics", "http://127.0.0.1:9/dump.safetensors").message("http://127.0.0.1:9/dump.safetensors: ")
    assert message["found"].endswith("(4 tries)")


@pytest.mark.parametrize("status", [401, 403])
def test_no_permission_is_said_at_once(status: int, web: Web, cli: Cli, write: Write) -> None:
    path = write()
    web.status, web.times = status, 1_000
    web.folder = web.folder / "nothing"
    answer = cli("is-metrics", f"{web.url}/{path}")
    assert answer.message(f"{web.url}/{path}: permission denied")["do"].startswith("log in as the tools")
    assert web.gets == 1


def test_what_is_not_there_is_said_at_once(web: Web, bucket: str, cli: Cli) -> None:
    url = f"{web.url}/missing.safetensors"
    cli("is-metrics", url).message(f"{url}: no such file")
    assert web.gets == 0
    for command in COMMANDS:
        for word in ("run/missing.safetensors", "missing", "other/"):
            cli(command, f"{bucket}/{word}").message(f"{bucket}/{word}: no such file, folder or bucket")
    cli("is-metrics", "s3://no-such-bucket/x").message("s3://no-such-bucket/x: no such file, folder or bucket")
    cli("is-metrics", f"{bucket}/many/*.pt").message(f"{bucket}/many/*.pt: no file matches this pattern")
    message = cli("is-metrics", f"{bucket}/nothing").message(f"{bucket}/nothing: a folder without dumps")
    assert message["found"] == "1 files (.txt)"


def test_missing_credentials_are_said_and_none_are_shown(
    bucket: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    began = time.monotonic()
    message = cli("is-metrics", f"{bucket}/run/step_7").message(f"{bucket}/run/step_7: permission denied")
    assert "credentials" in message["found"]
    assert time.monotonic() - began < 5
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_passwords_and_signatures_are_not_printed() -> None:
    for text, shown in (
        ("https://me:pass@host/a?x=1", "https://***@host/a?x=1"),
        ("https://token@host/a@b", "https://***@host/a@b"),
        ("s3://key:secret@bucket/a", "s3://key:***@bucket/a"),
        ("at 'http://h/a?X-Goog-Signature=ab&n=1'", "at 'http://h/a?X-Goog-Signature=***&n=1'"),
        ("http://h/a?sv=1&sig=ab%2F", "http://h/a?sv=1&sig=***"),
        ("hf://datasets/org/set@main/a", "hf://datasets/org/set@main/a"),
    ):
        assert without_secrets(text) == shown


def test_a_server_without_ranges_is_refused_without_loading_the_file(web: Web, cli: Cli, write: Write) -> None:
    path = write(junk=torch.zeros(2_000_000))
    web.ranges = False
    message = cli("is-metrics", f"{web.url}/{path}").message(f"{web.url}/{path}: byte ranges cannot be read")
    assert message["do"].endswith("copy it here first")


def test_a_server_that_lies_about_the_length_is_refused(web: Web, cli: Cli, write: Write) -> None:
    path = write()
    web.short = 3
    cli("is-metrics", f"{web.url}/{path}").message(f"{web.url}/{path}: byte")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_is_written_again_while_it_is_read_is_refused(
    command: str, web: Web, cli: Cli, write: Write
) -> None:
    path = write()
    web.etag = lambda: f'"{web.gets > 3}"'  # the header was read, the rows were not
    message = cli(command, f"{web.url}/{path}").message(f"{web.url}/{path}: it was written to, replaced or removed")
    assert message["do"] == "wait until it is written, then run again"


def test_a_file_on_s3_that_is_written_again_is_refused(bucket: str) -> None:
    fs = fsspec.filesystem("s3")
    fs.pipe("bucket/changing", b"a" * 100)
    source = RemoteBytes(f"{bucket}/changing")
    view = memoryview(bytearray(10))
    assert source.read_into(view, 90) == 10
    for content in (b"b" * 100, b"a" * 50):
        fs.pipe("bucket/changing", content)
        assert not source.is_unchanged()
    with pytest.raises(Exception, match="it shrank"):
        source.read_into(view, 90)


# What is loaded


@pytest.mark.parametrize("words", [["--help"], ["inspect", str(VERL / "bf16.safetensors")]])
def test_local_files_come_without_fsspec(words: list[str]) -> None:
    assert not imported_by(*words) & {"fsspec", "s3fs", "aiohttp", "huggingface_hub"}


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://bucket/a", "s3fs", "s3"),
        ("gs://bucket/a", "gcsfs", "gcs"),
        ("hf://datasets/org/set/a", "huggingface_hub", "hf"),
        ("https://localhost/a", "aiohttp", "http"),
    ],
)
def test_a_missing_package_is_named_by_its_extra(url: str, package: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None; from rollout_audit.cli import run; "
        f"sys.exit(run(['inspect', {url!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"rollout-audit: {url}: {url.split(':')[0]}:// needs a package that is not installed")
    assert done.stderr.endswith(f"  do:     pip install 'rollout-audit[{extra}]'\n")


def test_an_unknown_scheme_is_said(cli: Cli) -> None:
    assert "s3://" in cli("is-metrics", "what://a/b").message("what://a/b: cannot be opened")["wanted"]
