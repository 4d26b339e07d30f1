"""Whatever is wrong with the input is said in one message on stderr, with exit status 2: never a traceback."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from rollout_audit.errors import AuditError, printable
from rollout_audit.readers.paths import find_dumps
from rollout_audit.readers.safetensors_file import SafetensorsFile
from tests.conftest import IDS, MASK, NAN, OLD, ROLLOUT, Cli, Write, save_raw, save_tensors

PROGRAM = [sys.executable, "-m", "rollout_audit"]
COMMANDS = ("is-metrics", "debug-compare", "diagnose", "inspect")
UNUSABLE = "not a usable safetensors file: "


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, /dev/full or file names of any bytes")


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# Not this format


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "it is empty"),
        (b"x", "no safetensors header"),
        (b"step,loss\n1,0.5\n2,0.4\n3,0.3\n", "no safetensors header"),
        (b"PK\x03\x04" + bytes(100), "it looks like a zip file: a torch .pt or a .npz"),
        (pickle.dumps({"old_log_probs": 1}), "it looks like a pickle"),
        (b"PAR1" + bytes(100), "it looks like parquet"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "it looks like HDF5"),
        (b"\x93NUMPY\x01\x00" + bytes(100), "it looks like a numpy .npy file"),
        (b"\x1f\x8b\x08" + bytes(100), "it looks like gzip: unpack it first"),
        (b"\x28\xb5\x2f\xfd" + bytes(100), "it looks like zstd: unpack it first"),
        (b'{"input": "2 + 2 =", "output": "4", "score": 1.0}\n', "it looks like JSON"),
        (
            b"<!DOCTYPE html><title>404 Not Found</title>",
            "it looks like HTML or XML: a page saved in place of the file",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0f\nsize 158584\n",
            "it is a git-lfs pointer: the file itself has not been fetched (git lfs pull)",
        ),
    ],
    ids=lambda value: value[:12].decode("latin1") if isinstance(value, bytes) else "",
)
def test_a_file_of_another_kind_is_named(command: str, content: bytes, what: str, write: Write, cli: Cli) -> None:
    path = write()
    path.write_bytes(content)
    message = cli(command, path).message("dump.safetensors: ")
    assert message["what"] == f"dump.safetensors: {UNUSABLE}{what}"
    assert message.get("found", f"{len(content):,} bytes") == f"{len(content):,} bytes"


def test_a_real_torch_file_is_named(write: Write, cli: Cli) -> None:
    torch.save({"old_log_probs": torch.ones(2, 2)}, write())
    assert "a torch .pt" in cli("is-metrics", "dump.safetensors").message("dump.safetensors: ")["what"]


# A header that does not fit the file

HEADERS: dict[str, tuple[object, str]] = {
    "size": ({"a": entry(shape=[2])}, "the header lies: 'a' is F32 [2]"),
    "backwards": ({"a": entry(offsets=[4, 0])}, "the header lies: 'a' is F32 [1]"),
    "overlap": ({"a": entry(), "b": entry(offsets=[2, 6])}, "the header lies: 'b' overlaps another tensor"),
    "same place": ({"a": entry(), "b": entry()}, "the header lies: 'b' overlaps another tensor"),
    "hole": ({"a": entry(), "b": entry(offsets=[6, 10])}, "the header lies: 'b' leaves a hole before it"),
    "beyond": ({"a": entry(shape=[100], offsets=[0, 400])}, "truncated"),
    "too long": ({"a": entry(shape=[0], offsets=[0, 0])}, "bytes after the last tensor"),
    "huge": ({"a": entry(shape=[2**62, 2**62])}, f"the header lies: 'a' is F32 [{2**62}, {2**62}]"),
    "enormous": ({"a": entry(shape=[2**64])}, "shape or offsets of 'a' are no whole numbers from 0 to 2**63 - 1"),
    "many axes": ({"a": entry(shape=[9] * 9999)}, "'a' has 9,999 axes"),
    "negative": ({"a": entry(shape=[-1])}, "shape or offsets of 'a' are no whole numbers"),
    "negative offset": ({"a": entry(offsets=[-4, 0])}, "shape or offsets of 'a' are no whole numbers"),
    "boolean": ({"a": entry(shape=[True])}, "shape or offsets of 'a' are no whole numbers"),
    "float": ({"a": entry(shape=[1.0])}, "shape or offsets of 'a' are no whole numbers"),
    "string": ({"a": entry(shape="1")}, "shape or offsets of 'a' are no whole numbers"),
    "object": ({"a": entry(shape={})}, "shape or offsets of 'a' are no whole numbers"),
    "null": ({"a": entry(shape=None)}, "the header's entry of 'a' is malformed"),
    "three offsets": ({"a": entry(offsets=[0, 4, 8])}, "the header's entry of 'a' is malformed"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, "the header's entry of 'a' is malformed"),
    "number": ({"a": 1}, "the header's entry of 'a' is malformed"),
    "list": ({"a": [1]}, "the header's entry of 'a' is malformed"),
    "nothing": ({"a": None}, "the header's entry of 'a' is malformed"),
    "dtype": ({"a": entry(dtype="F33")}, "'a' has dtype F33"),
    "no dtype": ({"a": entry(dtype=None)}, "'a' has dtype None"),
    "dtypes": ({"a": entry(dtype=["F32"])}, "'a' has dtype ['F32']"),
    "metadata": ({"__metadata__": [1], "a": entry()}, "__metadata__ is not an object"),
    "array": ([1, 2], "no safetensors header"),
    "nan": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', "shape or offsets of 'a' are no whole"),
    "digits": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}", "the header is not JSON (Exceeds"),
    "twice": (b'{"a":1,"a":1}', "the header is not JSON (duplicate name 'a')"),
    "twice inside": (b'{"a":{"shape":[1],"shape":[1]}}', "the header is not JSON (duplicate name 'shape')"),
    "not UTF-8": (b'{"\xff":1}', "the header is not JSON ('utf-8' codec"),
    "deep arrays": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the header is not JSON (maximum recursion"),
    "deep objects": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "the header is not JSON (maximum recursion"),
    "more": (b"{} {}", "the header is not JSON (Extra data"),
    "open": (b'{"a": ', "the header is not JSON (Expecting value"),
    "byte order mark": (b"\xef\xbb\xbf{}", "no safetensors header"),
    "no header": (b"", "no safetensors header"),
}


@pytest.mark.parametrize(("header", "what"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies_is_refused(header: object, what: str, tmp_path: Path, cli: Cli) -> None:
    path = save_raw(str(tmp_path / "x.safetensors"), header, b"\0\0\0\0")
    assert cli("is-metrics", path).message(f"{path}: ")["what"].startswith(f"{path}: {UNUSABLE}{what}")


def test_a_truncated_payload_says_how_many_bytes_are_missing(write: Write, cli: Cli) -> None:
    path = write()
    path.write_bytes(path.read_bytes()[:-5])
    # 6 values each of two F32 and two I64 tensors: 48 + 96 bytes
    assert cli("is-metrics", path).message("dump.safetensors: ") == {
        "what": f"dump.safetensors: {UNUSABLE}truncated",
        "wanted": "144 bytes of tensors",
        "found": "139 bytes",
        "do": "copy it again, or wait until it is written",
    }


def test_a_truncated_header_says_how_many_bytes_are_missing(write: Write, cli: Cli) -> None:
    path = write()
    path.write_bytes(path.read_bytes()[:40])
    message = cli("inspect", path).message("dump.safetensors: ")
    assert message["what"].endswith("truncated in the header")
    assert message["found"] == "40 bytes"


def test_any_prefix_of_a_dump_and_any_byte_changed_is_read_or_refused(write: Write, cli: Cli) -> None:
    whole = write(metadata={"engine": "vllm"}).read_bytes()
    path = Path("broken.safetensors")
    start = 8 + int.from_bytes(whole[:8], "little")
    cases = [whole[:length] for length in range(0, len(whole), 29)]
    for place in range(0, start, 2):
        byte = b'\0"9}\xff'[place // 2 % 5]
        cases.append(whole[:place] + bytes([byte]) + whole[place + 1 :])
    for content in cases:
        path.write_bytes(content)
        answer = cli("is-metrics", path, "--quiet")
        assert answer.status == 0 or answer.message("broken.safetensors: "), content


def test_the_safetensors_library_refuses_the_headers_that_are_refused_here_and_no_other(tmp_path: Path) -> None:
    """2,000 headers with one or two places changed. (Names that are half a surrogate pair are read here only.)"""
    chance, path = random.Random(5), str(tmp_path / "x.safetensors")
    header = json.dumps(
        {"a": entry(shape=[2, 3], offsets=[0, 24]), "b": entry("U8", [2], [24, 26]), "c": entry("F64", [0], [26, 26])}
    )
    numbers = ["0", "1", "3", "24", "26", "-1", "1.0", "1e1", "9" * 30, "NaN", "null", "true"]
    words = [*numbers, "", " ", '"F32"', '"U8"', "[", "]", "[]", "{", "}", "{}", ",", ":", '"', "\\"]
    accepted = 0
    for _ in range(2000):
        text = header
        for _ in range(chance.randint(1, 2)):
            place = chance.randrange(len(text))
            text = text[:place] + chance.choice(words) + text[place + chance.randint(0, 2) :]
        save_raw(path, text.encode(), bytes(26))
        try:
            with safe_open(path, "np") as file:
                theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError:
            with pytest.raises(AuditError):
                SafetensorsFile(path)
        else:
            accepted += 1
            assert {name: info.shape for name, info in SafetensorsFile(path).tensors.items()} == theirs, text
    assert accepted > 50


# Files that change, and files that are none


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = write(), SafetensorsFile.read

    def shrink_and_read(file: SafetensorsFile, name: str, *rows: int, **more: Any) -> Any:
        os.truncate(path, 150)
        return read(file, name, *rows, **more)

    monkeypatch.setattr(SafetensorsFile, "read", shrink_and_read)
    for command in COMMANDS:
        path = write()
        message = cli(command, path).message("dump.safetensors: it shrank while '")
        assert message["do"] == "wait until it is written, then run again"


def test_a_file_that_is_replaced_while_it_is_read_is_said(
    write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, read = write(), write("other.safetensors", old_log_probs=ROLLOUT), SafetensorsFile.read

    def replace_and_read(file: SafetensorsFile, name: str, *rows: int, **more: Any) -> Any:
        if other.exists():
            other.replace(path)
        return read(file, name, *rows, **more)

    monkeypatch.setattr(SafetensorsFile, "read", replace_and_read)
    message = cli("is-metrics", path, "--json").message("dump.safetensors: it was written to, replaced or removed")
    assert message["do"] == "wait until it is written, then run again"
    assert cli("is-metrics", path, "--json").document["metrics"]["rollout_corr/kl"] == 0.0


def test_a_file_that_is_written_in_place_and_given_its_old_time_is_said(
    write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = write(), SafetensorsFile.read

    def write_and_read(file: SafetensorsFile, name: str, *rows: int, **more: Any) -> Any:
        before = path.stat()
        with path.open("r+b") as opened:
            opened.seek(-4, os.SEEK_END)
            opened.write(bytes(4))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync --inplace --times
        return read(file, name, *rows, **more)

    monkeypatch.setattr(SafetensorsFile, "read", write_and_read)
    cli("is-metrics", path, "--json").message("dump.safetensors: it was written to, replaced or removed")


def test_a_disk_that_fails_is_said(write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert cli("is-metrics", path).message("dump.safetensors: cannot be read: Input/output error")


def test_no_such_file_names_those_beside_it(write: Write, cli: Cli) -> None:
    write("step_7/rank_0.safetensors")
    assert cli("is-metrics", "step_7/rank_1.safetensors").message("step_7/rank_1.safetensors: no such file") == {
        "what": "step_7/rank_1.safetensors: no such file",
        "found": "beside it: rank_0.safetensors",
    }
    assert cli("inspect", "step_8/rank_1.safetensors").message("step_8/rank_1.safetensors: no such file")
    assert cli("debug-compare", "step_7", "nothing").message("nothing: no such file")


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("nothing*.safetensors", "nothing*.safetensors: no file matches this pattern"),
        ("**/nothing", "**/nothing: no file matches this pattern"),
        ("empty", "empty: a folder without dumps"),
        ("named.safetensors", "named.safetensors: a folder without dumps"),
        ("dump.safetensors/x", "dump.safetensors/x: no such file"),
        ("", "an empty file name"),
        ("-", "-: standard input cannot be read"),
        ("/dev/null", "/dev/null: not a file but a pipe or a device"),
        ("dangling.safetensors", "dangling.safetensors: a link to nothing"),
        ("loop.safetensors", "loop.safetensors: cannot be opened: Too many levels of symbolic links"),
        ("x" * 300, "x" * 300 + ": no such file"),
        ("~/dump.safetensors", "~/dump.safetensors: no such file"),
    ],
)
def test_a_word_that_leads_to_no_dump_is_refused(word: str, what: str, write: Write, cli: Cli) -> None:
    write()
    Path("empty").mkdir()
    Path("empty/notes.txt").touch()
    Path("named.safetensors").mkdir()
    Path("dangling.safetensors").symlink_to("nowhere")
    Path("loop.safetensors").symlink_to("loop.safetensors")
    for command in COMMANDS:
        assert cli(command, word).message(what)


def test_a_folder_says_which_files_it_has_instead(write: Write, cli: Cli) -> None:
    write()
    Path("run").mkdir()
    for name in ("a.pt", "b.pt", "log"):
        Path("run", name).touch()
    assert cli("is-metrics", "run").message("run: a folder without dumps")["found"] == "3 files (.pt, no suffix)"


def test_a_pipe_is_refused_and_not_waited_for(write: Write) -> None:
    write()
    os.mkfifo("pipe.safetensors")
    done = subprocess.run([*PROGRAM, "inspect", "pipe.safetensors"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith("rollout-audit: pipe.safetensors: not a file but a pipe or a device\n")


def test_one_broken_file_of_a_batch_stops_it(write: Write, cli: Cli) -> None:
    write("step_7/rank_0.safetensors")
    write("step_7/rank_1.safetensors").write_bytes(b"")
    assert cli("is-metrics", "step_7").message("step_7/rank_1.safetensors: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_somebody_else_is_said(write: Write, cli: Cli) -> None:
    write().chmod(0o000)
    assert cli("is-metrics", "dump.safetensors").message("dump.safetensors: permission denied")


def test_permission_denied_says_why_that_is_common(write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert "0600" in cli("is-metrics", path).message("dump.safetensors: permission denied")["do"]


def test_a_folder_that_cannot_be_listed_is_not_skipped(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("run/step_1/rank_0.safetensors")
    write("run/step_2/rank_0.safetensors")
    scandir = os.scandir

    def refuse_step_2(folder: str) -> Any:
        if str(folder).endswith("step_2"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse_step_2)
    with pytest.raises(AuditError, match="run/step_2: cannot be listed: Permission denied"):
        find_dumps(["run"])


def test_a_locked_folder_has_no_such_file(write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    write("locked/rank_0.safetensors")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    assert cli("inspect", "locked/rank_1.safetensors").message("locked/rank_1.safetensors: no such file")


def test_links_to_folders_are_followed_and_circles_end(write: Write) -> None:
    write("elsewhere/rank_0.safetensors")
    write("run/rank_1.safetensors")
    Path("run/linked").symlink_to("../elsewhere")
    Path("run/circle").symlink_to(".")
    assert find_dumps(["run"]) == ["run/linked/rank_0.safetensors", "run/rank_1.safetensors"]


@on_linux
def test_more_dumps_than_a_shell_lets_a_process_open_are_read(write: Write, cli: Cli) -> None:
    for rank in range(40):
        write(f"step_7/rank_{rank}.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 10, hard))
    try:
        answer = cli("is-metrics", "step_7", "--json")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answer.document["audited"]["num_valid_tokens"] == 40 * 5
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= open_now, "files stay open"


# Fields


@pytest.mark.parametrize(
    ("command", "changes", "expected"),
    [
        (
            "is-metrics",
            {"response_mask": None},
            {
                "what": "dump.safetensors: no response_mask",
                "found": "old_log_probs, responses, rollout_log_probs",
                "do": "say which tensor it is: --field response_mask=NAME; if no row is padded: --all-tokens",
            },
        ),
        ("is-metrics", {"old_log_probs": None}, {"what": "dump.safetensors: no old_log_probs"}),
        (
            "is-metrics",
            {"old_log_probs": None, "rollout_log_probs": None, "raw_rollout_is_weights": OLD},
            {"what": "dump.safetensors: no old_log_probs"},
        ),
        ("debug-compare", {"rollout_log_probs": None}, {"what": "dump.safetensors: no rollout_log_probs"}),
        ("debug-compare", {"old_log_probs": None}, {"what": "dump.safetensors: no old_log_probs"}),
        (
            "is-metrics",
            {"train_log_probs": OLD},
            {
                "what": "dump.safetensors: several tensors could be old_log_probs",
                "wanted": "one of them",
                "found": "old_log_probs, train_log_probs",
                "do": "say which: --field old_log_probs=old_log_probs",
            },
        ),
        (
            "debug-compare",
            {"response_mask": None, "loss_mask": MASK, "completion_mask": MASK},
            {
                "what": "dump.safetensors: several tensors could be response_mask",
                "found": "completion_mask, loss_mask",
            },
        ),
        (
            "is-metrics",
            {"rollout_log_probs": [[-1.0, -2.0], [-1.0, -2.0]]},
            {
                "what": "dump.safetensors: shapes differ",
                "wanted": "[2, 3] (old_log_probs)",
                "found": "[2, 2] (rollout_log_probs)",
            },
        ),
        ("is-metrics", {"response_mask": [[1, 1], [1, 0]]}, {"found": "[2, 2] (response_mask)"}),
        ("debug-compare", {"response_mask": [[1, 1], [1, 0]]}, {"found": "[2, 2] (response_mask)"}),
        ("is-metrics", {"response_mask": [[1, 1, 1]]}, {"found": "[1, 3] (response_mask)"}),
        (
            "is-metrics",
            {"response_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]},
            {
                "found": "[2, 5] (response_mask)",
                "do": "a mask over prompt and response can be taken as one: --field attention_mask=response_mask",
            },
        ),
        ("is-metrics", {"response_mask": [1, 1]}, {"what": "dump.safetensors: response_mask has shape [2]"}),
        ("debug-compare", {"responses": [11, 21]}, {"what": "dump.safetensors: responses has shape [2]"}),
        ("debug-compare", {"responses": [[11], [21]]}, {"found": "[2, 1] (responses)"}),
        (
            "is-metrics",
            {"old_log_probs": [-1.0], "rollout_log_probs": [-1.0], "response_mask": [1]},
            {"what": "dump.safetensors: old_log_probs has shape [1]", "wanted": "[sequences, tokens], padded"},
        ),
        (
            "is-metrics",
            {"old_log_probs": [OLD], "rollout_log_probs": [ROLLOUT], "response_mask": [MASK]},
            {"what": "dump.safetensors: old_log_probs has shape [1, 2, 3]"},
        ),
        (
            "is-metrics",
            {"old_log_probs": IDS},
            {
                "what": "dump.safetensors: old_log_probs is I64",
                "wanted": "F16 or BF16 or F32 or F64",
                "do": "if it is not old_log_probs, say which tensor is: --field old_log_probs=NAME",
            },
        ),
        ("debug-compare", {"rollout_log_probs": IDS}, {"what": "dump.safetensors: rollout_log_probs is I64"}),
        ("is-metrics", {"rollout_is_weights": MASK}, {"what": "dump.safetensors: rollout_is_weights is I64"}),
        (
            "is-metrics",
            {"response_mask": torch.ones(2, 3, dtype=torch.complex64)},
            {"what": "dump.safetensors: response_mask is C64"},
        ),
        (
            "is-metrics",
            {"old_log_probs": torch.ones(2, 3).to(torch.float8_e4m3fn)},
            {"what": "dump.safetensors: old_log_probs is F8_E4M3"},
        ),
        (
            "is-metrics",
            {"response_mask": [[0, 0, 0], [0, 0, 0]]},
            {
                "what": "dump.safetensors: no valid token",
                "wanted": "at least one 1 in the mask",
                "found": "2 sequences, all masked out",
            },
        ),
    ],
)
def test_a_field_that_is_missing_or_does_not_fit_is_named(
    command: str, changes: dict[str, Any], expected: dict[str, str], write: Write, cli: Cli
) -> None:
    answer = cli(command, write(**changes))
    message = answer.message("dump.safetensors: ")
    assert message | expected == message


def test_files_of_one_batch_must_have_the_same_fields(write: Write, cli: Cli) -> None:
    write("step_7/rank_0.safetensors")
    write("step_7/rank_1.safetensors", rollout_log_probs=None)
    message = cli("is-metrics", "step_7").message("step_7/rank_1.safetensors: no rollout_log_probs, which ")
    assert message["wanted"] == "the same fields in every file of a batch"


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_a_dump_of_no_tokens_is_refused_by_is_metrics_and_answered_by_debug_compare(
    shape: tuple[int, int], write: Write, cli: Cli
) -> None:
    empty = torch.zeros(shape)
    path = write(old_log_probs=empty, rollout_log_probs=empty, response_mask=empty.int(), responses=empty.int())
    assert "no valid token" in cli("is-metrics", path).message("")["what"]
    answer = cli("debug-compare", path, "--json")
    assert answer.status == 0
    assert answer.document["audited"]["num_sequences"] == shape[0]
    assert answer.document["metrics"]["training/rollout_probs_diff_valid"] == 0
    inspected = cli("inspect", path, "--json").document
    assert inspected["audited"]["num_valid_tokens"] == 0


def test_debug_compare_of_no_valid_token_answers_as_verl_does(write: Write, cli: Cli) -> None:
    answer = cli("debug-compare", write(response_mask=[[0, 0, 0], [0, 0, 0]]), "--json")
    assert answer.status == 0
    assert answer.document["metrics"] == {
        "training/rollout_probs_diff_valid": 0,
        "training/rollout_probs_diff_max": None,
        "training/rollout_probs_diff_mean": None,
        "training/rollout_probs_diff_std": None,
        "training/rollout_actor_probs_pearson_corr": None,
    }


def test_a_dump_without_rows_is_named(write: Write, cli: Cli) -> None:
    empty = torch.zeros(0, 3)
    path = write(old_log_probs=empty, rollout_log_probs=empty, response_mask=empty.int(), responses=None)
    assert cli("is-metrics", path).message("dump.safetensors: no valid token")


# Options


@pytest.mark.parametrize(
    ("threshold", "what"),
    [
        ("abc", "Invalid rollout_is_threshold 'abc'."),
        ("0x10", "Invalid rollout_is_threshold '0x10'."),
        ("1,5", "Invalid rollout_is_threshold '1,5'."),
        ("True", "Invalid rollout_is_threshold 'True'."),
        ("nan", "Invalid rollout_is_threshold 'nan': not a number."),
        ("0.5_nan", "Invalid rollout_is_threshold '0.5_nan': not a number."),
        ("0", "rollout_is_threshold upper bound must be positive, got 0.0."),
        ("-1", "rollout_is_threshold upper bound must be positive, got -1.0."),
        ("-inf", "rollout_is_threshold upper bound must be positive, got -inf."),
        ("0_5", "rollout_is_threshold lower bound must be positive, got 0.0."),
        ("5_0.5", "rollout_is_threshold lower bound must be <= upper bound."),
        ("1_2_3", "Invalid rollout_is_threshold '1_2_3'."),
        ("_5", "Invalid rollout_is_threshold '_5'."),
        ("5_", "Invalid rollout_is_threshold '5_'."),
        ("_", "Invalid rollout_is_threshold '_'."),
        ("", "rollout_is_threshold must not be an empty string."),
        ("  ", "rollout_is_threshold must not be an empty string."),
    ],
)
def test_a_weight_threshold_that_makes_no_sense_is_refused(threshold: str, what: str, write: Write, cli: Cli) -> None:
    assert cli("is-metrics", write(), "--rollout-is-threshold", threshold).message(what) == {"what": what}


def test_an_infinite_weight_threshold_truncates_nothing(write: Write, cli: Cli) -> None:
    old = [[-0.5, -1.5, 30.0], [0.0, -1.0, NAN]]
    answer = cli("is-metrics", write(old_log_probs=old), "--rollout-is-threshold", "inf", "--json").document
    assert answer["settings"]["rollout_is_threshold"] == "inf"
    assert answer["audited"]["truncated_token_fraction"] == 0.0
    # verl's own safety bound of ±20 stays: exp(20)
    assert answer["metrics"]["rollout_corr/rollout_is_max"] == pytest.approx(485165195.4097903, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "thresholds", "what"),
    [
        ("token_k1", "abc", "Invalid numeric threshold for option 'token_k1' 'abc'."),
        ("token_k1", "0", "Thresholds for option 'token_k1' must be positive, got 0."),
        ("token_k1", "-1", "Thresholds for option 'token_k1' must be positive, got -1."),
        ("token_k1", "0_2", "Thresholds for option 'token_k1' must be positive, got 0_2."),
        ("token_k1", "nan", "Invalid numeric threshold for option 'token_k1' 'nan': not a number."),
        ("token_k1", "5_0.5", "Thresholds for option 'token_k1' must be lower <= upper, got 5_0.5."),
        ("token_k1", "1_2_3", "Invalid numeric threshold for option 'token_k1' '1_2_3'."),
        ("token_k1", "inf", "Threshold inf for option 'token_k1' has no reciprocal"),
        ("token_k3", "0.5_2.0", "rollout_rs_threshold for option 'token_k3' must provide a single upper bound"),
        ("token_k3", "0", "Threshold for option 'token_k3' must be positive, got 0."),
        ("token_k1,token_k3", "0.5_2.0", "rollout_rs_threshold for option 'token_k3' must provide a single upper"),
        ("token_k1,token_k3", "0.5_2.0,0.1,0.3", "rollout_rs_threshold expects either one threshold"),
        ("token_k1,token_k2,token_k3", "0.5_2.0,0.1", "rollout_rs_threshold expects either one threshold"),
        ("token_k1", "", "rollout_rs_threshold must contain at least one threshold value."),
        ("token_k1", ",", "rollout_rs_threshold must contain at least one threshold value."),
        ("token_k1", None, "rollout_rs_threshold must be provided for rejection sampling."),
        (None, "2.0", "a rollout_rs_threshold without rollout_rs"),
        ("none", "2.0", "a rollout_rs_threshold without rollout_rs"),
        ("", "2.0", "rollout_rs must contain at least one valid option."),
        ("tokn_k1", "2.0", "Invalid rollout_rs option: tokn_k1. Must be one of ['seq_max_k2', "),
        ("seq_max_k1", "2.0", "Invalid rollout_rs option: seq_max_k1. Must be one of ['seq_max_k2', "),
        ("token_k1,bogus", "2.0", "Invalid rollout_rs option: bogus."),
    ],
)
def test_a_rejection_rule_that_makes_no_sense_is_refused(
    options: str | None, thresholds: str | None, what: str, write: Write, cli: Cli
) -> None:
    words = [] if options is None else ["--rollout-rs", options]
    words += [] if thresholds is None else ["--rollout-rs-threshold", thresholds]
    assert cli("is-metrics", write(), *words).message(what)


def test_an_unknown_preset_names_those_that_are_near(write: Write, cli: Cli) -> None:
    message = cli("is-metrics", write(), "--preset", "decoupled_seq_is_sr").message("no preset 'decoupled_seq_is_sr'")
    assert "decoupled_seq_is_rs" in message["do"]
    assert message["wanted"].split(", ")[0] == "decoupled_token_is"


@pytest.mark.parametrize(
    ("words", "what", "do"),
    [
        (["is-metrics"], "Missing argument 'DUMP...'.", "rollout-audit is-metrics --help"),
        (["is-metrics", "x", "--rollout-is", "geometric"], "Invalid value for '--rollout-is': ", None),
        (["is-metrics", "x", "--threads", "many"], "Invalid value for '--threads': ", None),
        (["is-metrics", "x", "--threads", "-1"], "Invalid value for '--threads': ", None),
        (["is-metrics", "x", "--jsn"], "No such option", None),
        (["is-metrics", "x", "--device"], "Option '--device' requires an argument.", "rollout-audit --help"),
        (["debug-compare", "x", "--top", "-1"], "Invalid value for '--top': ", "rollout-audit debug-compare --help"),
        (["debug-compare", "x", "--match", "row"], "Invalid value for '--match': ", None),
        (["debug-compare", "x", "y", "z"], "Got unexpected extra argument", None),
        (["debug-compare", "x", "--match", "uid"], "--match uid with one file", "leave --match out"),
        (["inspect", "x", "--bad\nname"], "No such option", "rollout-audit inspect --help"),
        (["is-metric", "x"], "No such command 'is-metric'. Did you mean 'is-metrics'?", "rollout-audit --help"),
        (["--verbose"], "No such option", "rollout-audit --help"),
    ],
)
def test_wrong_words_say_where_the_help_is(words: list[str], what: str, do: str | None, cli: Cli) -> None:
    message = cli(*words).message(what)
    assert message["do"] == (do or f"rollout-audit {words[0]} --help")


@pytest.mark.parametrize(
    "device", ["nonsense", "cuda:abc", "cuda:-1", "cuda:²", "cuda:", "cuda:0:0", "CUDA", "cpu ", "gpu"]
)
def test_a_device_that_does_not_exist_is_refused(device: str, write: Write, cli: Cli) -> None:
    message = cli("is-metrics", write(), "--device", device).message(f"--device {device}: no such device")
    assert message["wanted"] == "cpu, cuda, cuda:N or mps"


@pytest.mark.parametrize("device", ["cuda:99", "cuda:99999999999999999999", "cpu:1", "mps:7"])
def test_a_device_that_this_machine_lacks_is_refused(device: str, write: Write, cli: Cli) -> None:
    message = cli("debug-compare", write(), "--device", device).message(f"--device {device}: no such device")
    assert "such devices here" in message["found"]
    assert message["do"] == "--device cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_cuda_without_a_gpu_is_refused(write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_AUDIT_DEVICE", "cuda")
    assert "sees 0 such devices" in cli("is-metrics", write()).message("--device cuda: no such device")["found"]


@pytest.mark.parametrize("word", ["x", "=", "=x", "response_mask=", "mask=x", "log_probs=x", "Response_Mask=x", ""])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_field_option_of_another_form_is_refused(command: str, word: str, write: Write, cli: Cli) -> None:
    message = cli(command, write(), "--field", word).message(f"--field {word}: not understood")
    assert message["wanted"].startswith("CANONICAL=NAME, with CANONICAL one of rollout_log_probs, old_log_probs, ")


def test_a_field_option_that_names_no_tensor_lists_those_there_are(write: Write, cli: Cli) -> None:
    assert cli("is-metrics", write(), "--field", "response_mask=a=b").message("dump.safetensors: ") == {
        "what": "dump.safetensors: no tensor 'a=b'",
        "wanted": "a=b (--field response_mask=a=b)",
        "found": "old_log_probs, response_mask, responses, rollout_log_probs",
    }


def test_one_tensor_cannot_be_two_fields(write: Write, cli: Cli) -> None:
    words = ["--field", "rollout_log_probs=old_log_probs", "--field", "old_log_probs=old_log_probs"]
    for command in ("is-metrics", "debug-compare"):
        message = cli(command, write(), *words).message("dump.safetensors: one tensor is used as ")
        assert message["what"].endswith(" (old_log_probs)")
    twice = cli("debug-compare", write(), "--rollout-key", "old_log_probs", "--actor-key", "old_log_probs")
    assert twice.message("dump.safetensors: one tensor is used as ")


def test_one_field_cannot_be_two_tensors(write: Write, cli: Cli) -> None:
    words = ["--field", "old_log_probs=old_log_probs", "--actor-key", "rollout_log_probs"]
    message = cli("debug-compare", write(), *words).message("old_log_probs is given twice")
    assert message["found"] == "old_log_probs, rollout_log_probs"


@pytest.mark.parametrize(
    "gate",
    [
        "",
        "kl",
        "kl >",
        "> 1",
        "kl > x",
        "kl > nan",
        "kl > inf",
        "kl > 0x1",
        "kl > 0.5_2.0",
        "kl > 1_0",
        "kl = 1",
        "kl => 1",
        "kl <> 1",
        "kl ≥ 1",
        "kl > 1 and k3_kl > 1",
        "0 < kl < 1",
        "kl > 1%",
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_gate_that_cannot_be_read_is_refused_before_the_work(command: str, gate: str, cli: Cli) -> None:
    message = cli(command, "no such file", "--fail-if", gate).message(f"--fail-if '{gate}': not understood")
    assert message["wanted"] == "'METRIC OP NUMBER', OP one of <= >= == != < >"


# Names that are text, not markup, codes or lines


def test_a_name_with_markup_is_shown_as_it_is(write: Write, cli: Cli) -> None:
    name = "[bold]step[/bold]/[red]rank_[0][/].safetensors"
    write(name, **{"[link=x]a[/nothing]": MASK}, metadata={"[b]": "[/i]"})
    for command in COMMANDS:
        answer = cli(command, name)
        assert answer.status == 0
        assert name in answer.out
    assert "[link=x]a[/nothing]" in answer.out
    assert "[b]=[/i]" in answer.out
    assert cli("is-metrics", "[bold]x[/y]").message("[bold]x[/y]: no ")


def test_control_characters_in_names_cannot_reach_the_terminal(write: Write, cli: Cli) -> None:
    name = "a\x1b[31m\nb.safetensors"
    tensor = "rollout-audit: fine\x1b]0;title\x07\r\n"
    write(name, response_mask=None, **{tensor: MASK})
    shown = "a\\x1b[31m\\nb.safetensors"
    message = cli("is-metrics", name).message(f"{shown}: no response_mask")
    assert "rollout-audit: fine\\x1b]0;title\\x07\\r\\n" in message["found"]
    for words in (["debug-compare", name], ["inspect", name], ["is-metrics", name, "--all-tokens"]):
        answer = cli(*words)
        assert answer.status == 0
        assert shown in answer.out
        assert "\x1b" not in answer.out + answer.err
        assert "\r" not in answer.out + answer.err


def test_text_that_can_be_printed_stays_as_it_is() -> None:
    assert printable("step_7/é/日本語.safetensors") == "step_7/é/日本語.safetensors"
    assert printable("a\tb\x00\u202e\udcff") == "a\\tb\\x00\\u202e\\udcff"


def test_an_error_holds_its_parts_and_prints_them_in_order() -> None:
    error = AuditError("no mask", path="a.safetensors", do="say which", wanted="a mask")
    assert str(error) == "a.safetensors: no mask\n  wanted: a mask\n  do:     say which"
    assert (error.what, error.path, error.found) == ("no mask", "a.safetensors", None)


# How a run ends


def test_a_fault_of_the_tool_is_status_3_and_asks_for_a_report(
    write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shards\x1b collide")

    monkeypatch.setattr("rollout_audit.inspection.inspect_file", fail)
    answer = cli("inspect", write())
    said = (
        "rollout-audit: a fault of rollout-audit itself: RuntimeError: shards\\x1b collide\n"
        "  do:     please report it with the output of: rollout-audit --debug COMMAND...\n"
    )
    assert (answer.status, answer.out, answer.err) == (3, "", said)
    debugged = cli("--debug", "inspect", write())
    assert debugged.status == 3, "a crash must not look like a failed gate, which is 1"
    assert debugged.err.startswith("Traceback (most recent call last):\n")
    assert debugged.err.endswith(said)


def test_an_interrupt_anywhere_is_status_130_and_one_line(
    write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    path = write()
    monkeypatch.setattr(SafetensorsFile, "read", interrupt)
    for command in COMMANDS:
        answer = cli(command, path)
        assert (answer.status, answer.out, answer.err) == (130, "", "rollout-audit: interrupted\n")


def test_ctrl_c_ends_a_process_at_work(write: Write) -> None:
    path = write()
    at_work = (
        "import sys, time\n"
        "from rollout_audit.readers.safetensors_file import SafetensorsFile\n"
        "def read(*_, **__):\n"
        "    open('at_work', 'w').close()\n"
        "    time.sleep(60)\n"
        "SafetensorsFile.read = read\n"
        "from rollout_audit.cli import main\n"
        f"sys.argv = ['rollout-audit', 'inspect', {str(path)!r}]\n"
        "main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", at_work], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(600):
        if Path("at_work").exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"", b"rollout-audit: interrupted\n")


def test_a_reader_that_leaves_is_no_error(write: Write) -> None:
    write()
    program = " ".join(PROGRAM)
    for command, first in (("", "| head -1"), ("--json", "| head -c 10")):
        shell = f"set -o pipefail; {program} is-metrics dump.safetensors {command} {first}"
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout in ("is-metrics  dump.safetensors\n", '{\n  "schem')


@pytest.mark.parametrize(
    ("words", "status", "err"),
    [
        (["inspect", "dump.safetensors"], 0, ""),
        (["inspect", "dump.safetensors", "--json"], 0, ""),
        (["--help"], 0, ""),
        (["--version"], 0, ""),
        (["inspect", "dump.safetensors", "--fail-if", "num_valid_tokens == 5"], 1, ""),
    ],
)
def test_a_pipe_that_is_closed_already_is_no_error_and_gates_still_count(
    words: list[str], status: int, err: str, write: Write
) -> None:
    write()
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*PROGRAM, *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (status, err)


@on_linux
def test_a_full_disk_is_said(write: Write) -> None:
    write()
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PROGRAM, "inspect", "dump.safetensors"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "rollout-audit: the output cannot be written: No space left on device\n",
    )


@on_linux
@pytest.mark.parametrize(
    ("redirection", "words", "status"),
    [
        (">&-", "inspect dump.safetensors", 0),
        (">&-", "inspect dump.safetensors --fail-if 'num_valid_tokens == 5'", 1),
        ("2>&-", "inspect nothing", 2),
        ("2>/dev/full", "inspect nothing", 2),
        ("2>&1 | true", "inspect nothing", 2),
    ],
)
def test_the_status_does_not_depend_on_who_listens(redirection: str, words: str, status: int, write: Write) -> None:
    write()
    shell = f"set -o pipefail; {' '.join(PROGRAM)} {words} {redirection}"
    assert subprocess.run(["bash", "-c", shell], capture_output=True).returncode == status


@on_linux
def test_a_file_name_that_stdout_cannot_encode_is_no_fault(write: Write) -> None:
    write("é\udcff.safetensors")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [*PROGRAM, "inspect", "é\udcff.safetensors"]
    done = subprocess.run(words, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.splitlines()[0] == b"\\xe9\\udcff.safetensors"
    done = subprocess.run([*words, "--json"], capture_output=True, env=environment)
    assert json.loads(done.stdout)["inputs"][0]["path"] == "é\udcff.safetensors"


def test_no_message_is_printed_when_all_is_well(write: Write, cli: Cli) -> None:
    for command in COMMANDS:
        answer = cli(command, write())
        assert (answer.status, answer.err) == (0, "")


def test_a_dump_of_somebody_elses_tensors_is_answered_by_name(write: Write, cli: Cli) -> None:
    path = save_tensors("weights.safetensors", {"lm_head.weight": torch.ones(4, 4)})
    message = cli("is-metrics", path).message("weights.safetensors: no ")
    assert message["found"] == "lm_head.weight"
