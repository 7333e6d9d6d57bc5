"""The command line: what it prints, deletes and refuses."""

import contextlib
import datetime
import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import types
from collections import namedtuple
from pathlib import Path

import pytest
import torch

import torchcache2
from tests.helpers.commands import run
from tests.helpers.storage import (
    CPU,
    NAMESPACES,
    NEVER,
    Unsynced,
    flip,
    found,
    key_of,
    keys_of,
    put,
    rows_of,
    sealed_names,
    segments,
    size_of,
    snapshot,
    strange_files,
)
from tests.helpers.warm import start
from torchcache2.__main__ import main
from torchcache2.cli.report import verdict
from torchcache2.core.rows import Rows
from torchcache2.files import layout as segment
from torchcache2.files.codec import codec
from torchcache2.files.directory import FINGERPRINT, LOCK, MIRROR, TAG
from torchcache2.files.filesystem import FileSystem, ulid
from torchcache2.files.layout import read_head, write_head
from torchcache2.files.segment import encode
from torchcache2.tiers.disk.tier import DiskTier

FIRST, SECOND, THIRD = (namespace.hex() for namespace in NAMESPACES)
CLASSES = {NAMESPACES[0]: "models.Backbone", NAMESPACES[1]: "models.Encoder", NAMESPACES[2]: "train.Teacher"}
CREATED = "2020-02-02T20:20:20+00:00"
DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def run_in_terminal(*arguments):
    """What a command writes to a terminal."""
    master, slave = pty.openpty()
    pieces = []

    def read():
        with contextlib.suppress(OSError):
            while piece := os.read(master, 1 << 16):
                pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context(open(slave, "w"))
        stack.enter_context(contextlib.redirect_stdout(terminal))
        stack.enter_context(contextlib.redirect_stderr(terminal))
        stack.enter_context(pytest.raises(SystemExit))
        main(list(map(str, arguments)))
    reader.join()
    os.close(master)
    return b"".join(pieces).decode().replace("\r\n", "\n")


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def described(namespace):
    return {"class": CLASSES[namespace], "created": CREATED, "parts": {}, "values": {}}


def tier(path, **options):
    return DiskTier(path, delay=NEVER, description=described, fs=Unsynced(), **options)


def fill(path, counts=(30, 20, 10), width=64, **options):
    """One segment of each namespace, the first of them the one that was used last."""
    disk = tier(path, **options)
    for namespace, count in zip(NAMESPACES, counts, strict=False):
        put(disk, range(count), width, namespace)
        disk.flush()
    disk.close()
    for number, namespace in enumerate(NAMESPACES[: len(counts)]):
        for file in segments(path, namespace):
            os.utime(file, (1_700_000_000 - number,) * 2)
    return path


@pytest.fixture
def path(tmp_path):
    return fill(tmp_path / "cache")


# Whatever the command


COMMANDS = [("ls",), ("stats",), ("verify",), ("prune", "--max-size", "1GB"), ("rm", "--all", "--yes")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("nothing", "does not exist"),
        ("file", "is a file, not a cache directory"),
        ("empty", "is empty: no cache has written to it yet"),
        ("foreign", "is not a cache directory: it has no CACHEDIR.TAG of torchcache2"),
        ("tag of others", "is not a cache directory: it has no CACHEDIR.TAG of torchcache2"),
        ("newer", "Upgrade torchcache2"),
    ],
)
def test_what_is_no_cache_directory_is_an_error_in_one_line(tmp_path, command, kind, sentence):
    path = tmp_path / "there"
    if kind == "file":
        path.write_text("text")
    elif kind != "nothing":
        path.mkdir()
    if kind == "foreign":
        (path / "thesis.tex").write_text("text")
    elif kind == "tag of others":
        (path / TAG).write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
    elif kind == "newer":
        fill(path, (3,))
        text = (path / TAG).read_text()
        (path / TAG).write_text(text.replace("format 2", "format 3"))
    before = snapshot(tmp_path)
    done = run(*command, path, code=2)
    assert done.out == "" and done.err.startswith("torchcache2: ") and done.err.count("\n") == 1
    assert sentence in done.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bogus"], "No such command"),
        (["ls", "--bogus"], "No such option"),
        (["ls", "--format", "xml"], "xml"),
        (["prune"], "--max-size"),
        (["prune", "--max-size", "5XB"], "--max-size='5XB': expected"),
        (["prune", "--max-size", "-1"], "--max-size='-1': expected"),
        (["rm"], "Missing argument"),
        (["rm", "."], "expected namespaces after DIR, as `torchcache2 ls DIR` prints them, or --all"),
        (
            ["rm", ".", FIRST, "--all"],
            "expected namespaces after DIR, as `torchcache2 ls DIR` prints them, or --all",
        ),
        (["rm", ".", ""], "there is no namespace"),
        (["rm", ".", "00"], "there is no namespace '00'"),
        (["rm", ".", "s"], "there is no namespace 's'"),
        (["rm", ".", FIRST + "0"], "there is no namespace"),
        (["rm", "../there/", FIRST], "does not exist"),
    ],
)
def test_mistakes_are_told_without_a_traceback(path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(path)
    before = snapshot(path)
    done = run(*arguments, code=2)
    assert sentence in done.err and done.out == ""
    assert snapshot(path) == before


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_a_missing_library_is_named_with_the_way_to_get_it(monkeypatch, library):
    for name in [
        name for name in sys.modules if name.startswith(("rich", "typer", "torchcache2.cli.commands"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    done = run("ls", code=2)
    assert done.err == f'torchcache2 needs {library}: pip install "torchcache2[cli]"\n'


def test_version_and_help():
    assert run("--version").out == f"torchcache2 {torchcache2.__version__}\n"
    out = run("--help").out
    for command in ("ls", "stats", "verify", "prune", "rm"):
        assert re.search(rf"^  {command} ", out, re.MULTILINE)
        assert "Usage: torchcache2 " in run(command, "--help").out


def test_it_runs_as_a_module(path):
    script = """
        import runpy, sys
        sys.argv[0:1] = ["torchcache2", "ls"]
        runpy.run_module("torchcache2", run_name="__main__")
    """
    assert start(script, path).done().out.splitlines()[0].startswith("namespace\tclass")


def test_the_folder_is_this_one_by_default(path, monkeypatch):
    monkeypatch.chdir(path)
    assert run("ls").out == run("ls", path).out
    assert run("stats").out == run("stats", path).out


# ls and stats


def test_ls_prints_a_line_for_each_namespace_the_last_used_first(path):
    header, *lines = run("ls", path).cells
    assert header == ["namespace", "class", "rows", "bytes", "a row", "ratio", "age", "last use", "in use"]
    assert [line[:3] for line in lines] == [
        [FIRST[:8], "models.Backbone", "30"],
        [SECOND[:8], "models.Encoder", "20"],
        [THIRD[:8], "train.Teacher", "10"],
    ]
    now = datetime.datetime.now(datetime.timezone.utc)
    age = (now - datetime.datetime.fromisoformat(CREATED)).days
    for line in lines:
        size = sum(file.stat().st_size for file in (path / line[0]).parent.glob(f"{line[0]}*/*.safetensors"))
        assert line[4] == f"{size // int(line[2])} B"
        assert int(line[6].removesuffix(" d")) in (age, age + 1)
        assert line[7].endswith(" d") and line[8] == "no"


def test_ls_in_json_has_the_whole_names_and_exact_numbers(path):
    one = run("ls", path, "--format", "json").json[0]
    file = segments(path, NAMESPACES[0])[0]
    assert one == {
        "namespace": FIRST,
        "class": "models.Backbone",
        "label": None,
        "methods": [],
        "dataset": None,
        "segments": 1,
        "unreadable": 0,
        "rows": 30,
        "bytes": file.stat().st_size + (file.parent / FINGERPRINT).stat().st_size,
        "row_bytes": 30 * 64 * 4,
        "ratio": round(30 * 64 * 4 / file.stat().st_size, 4),
        "codecs": {"brotli": 1},
        "created": CREATED,
        "last_used": "2023-11-14T22:13:20+00:00",
        "in_use": False,
    }


def test_the_ratio_is_of_rows_as_they_are_in_memory(tmp_path):
    fill(tmp_path / "zeros", ())
    disk = tier(tmp_path / "zeros")
    disk.put(keys_of(range(64)), Rows.from_pytree(torch.zeros(64, 10_000), 64, device=CPU))
    disk.put(keys_of(range(64, 65)), Rows.from_pytree(torch.zeros(1, 20_000), 1, device=CPU))  # ragged
    disk.close()
    one = run("ls", tmp_path / "zeros", "--format", "json").json[0]
    assert one["row_bytes"] == 4 * (64 * 10_000 + 20_000)
    assert one["ratio"] > 100


def test_a_table_shows_as_much_of_a_namespace_as_tells_it_from_the_others(path):
    twin = FIRST[:12] + "0" * 20
    (path / FIRST).rename(path / "kept")
    for name in (FIRST, twin):
        (path / name).mkdir()
        for file in (path / "kept").iterdir():
            (path / name / file.name).write_bytes(file.read_bytes())
    assert [line[0] for line in run("ls", path).cells[1:]].count(FIRST[:13]) == 1


def test_a_namespace_in_use_is_said_to_be(path):
    disk = tier(path)
    assert found(disk, range(3), 64) == [0, 1, 2]
    used = {one["namespace"]: one["in_use"] for one in run("ls", path, "--format", "json").json}
    assert used == {FIRST: True, SECOND: False, THIRD: False}
    assert run("stats", path, "--format", "json").json["in_use"] == 1
    disk.close()
    assert not any(one["in_use"] for one in run("ls", path, "--format", "json").json)


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "{", "[]", "null", "[" * 100_000, "\xff"),
        *('{"class": 3}', '{"class": ""}', '{"created": "yesterday"}'),
    ],
)
def test_no_or_a_garbled_fingerprint_hides_no_namespace(path, text):
    file = path / FIRST / FINGERPRINT
    file.unlink() if text is None else file.write_text(text, encoding="latin-1")
    one = next(one for one in run("ls", path, "--format", "json").json if one["namespace"] == FIRST)
    assert (one["class"], one["rows"], one["in_use"]) == ("?", 30, False)
    # The name of a segment says when it was written.
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(one["created"])
    assert abs(age.total_seconds()) < 3600


@pytest.mark.parametrize(
    "created", ["9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00", "2020-02-02T20:20:20Z", "2020-02-02"]
)
def test_any_time_can_be_printed(path, created):
    (path / FIRST / FINGERPRINT).write_text(json.dumps({"class": "models.Backbone", "created": created}))
    run("ls", path)
    run("ls", path, "--format", "json")


def test_a_name_from_a_file_does_not_steer_the_terminal(path):
    name = "models.\x1b[2J\x07Back\tbone\n[bold red]\u202e" + "x" * 10_000
    (path / FIRST / FINGERPRINT).write_text(json.dumps({"class": name}))
    line = run("ls", path).cells[1]
    assert (
        len(line) == 9 and line[1].startswith("models.?[2J?Back?bone?[bold red]?xxx") and len(line[1]) <= 120
    )
    (path / FIRST / FINGERPRINT).write_text(json.dumps({"class": "\x1b[2J\x07[bold red]"}))
    text = run_in_terminal("ls", path)
    assert "\x1b[2J" not in text and "\x07" not in text and "?[2J?[bold red]" in text


def test_letters_that_the_terminal_does_not_have_are_escaped(path):
    (path / FIRST / FINGERPRINT).write_text(json.dumps({"class": "модели.Основа"}))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        main(["ls", str(path)])
    out.flush()
    assert b"\\u043c" in out.buffer.getvalue()


def test_an_empty_cache_has_no_namespaces(tmp_path):
    fill(tmp_path / "cache", ())
    assert len(run("ls", tmp_path / "cache").cells) == 1
    assert run("ls", tmp_path / "cache", "--format", "json").json == []
    assert run("stats", tmp_path / "cache", "--format", "json").json["rows"] == 0
    assert "0 good segments" in run("verify", tmp_path / "cache").out
    assert "namespace" in run_in_terminal("ls", tmp_path / "cache")


def test_segments_that_cannot_be_opened_are_counted(path):
    segments(path, NAMESPACES[0])[0].write_bytes(b"garbage")
    done = run("ls", path)
    assert done.cells[1][2] == "0" and "1 segment cannot be opened" in done.err
    assert run("stats", path, "--format", "json").json["unreadable"] == 1
    assert "segments\t3, 1 unreadable" in run("stats", path).out


def test_stats_counts_everything(path):
    with_none = tier(path, codec="none")
    put(with_none, range(100, 105), 64)
    with_none.close()
    folder = path / FIRST
    (folder / (ulid() + ".safetensors.corrupt")).write_bytes(b"12345")
    (folder / (ulid() + ".safetensors.tmp")).write_bytes(b"12345")
    (folder / "notes.txt").write_text("mine")
    (path / "notes.txt").write_text("mine")
    (path / "folder").mkdir()
    counts = run("stats", path, "--format", "json").json
    rows, files = counts.pop("row_bytes"), segments(path)
    ratio = rows / sum(file.stat().st_size for file in files)
    assert rows == 65 * 64 * 4 and counts.pop("ratio") == round(ratio, 4)
    assert counts.pop("bytes") == size_of(path) - len("mine")
    assert counts == {
        "directory": str(path),
        "format": 2,
        "namespaces": 3,
        "in_use": 0,
        "segments": 4,
        "unreadable": 0,
        "rows": 65,
        "codecs": {"brotli": 3, "none": 1},
        "corrupt": 1,
        "temporary": 1,
        "foreign": 3,
    }
    text = dict(run("stats", path).cells)
    assert text["rows"] == "65" and text["codecs"] == "brotli 3, none 1" and text["foreign files"] == "3"


# verify


def test_verify_finds_nothing_in_what_was_written(path):
    before = snapshot(path)
    assert (
        run("verify", path).out
        == "3 good segments with 60 rows; 0 damaged, 0 unreadable, 0 not checked, 0 set aside earlier\n"
    )
    assert run("verify", path, "--format", "json").json == {
        "good": 3,
        "damaged": 0,
        "unreadable": 0,
        "unchecked": 0,
        "gone": 0,
        "rows": 60,
        "set_aside": 0,
        "files": [],
    }
    assert snapshot(path) == before


@pytest.mark.parametrize("name", ["none", "brotli", "blosc2"])
@pytest.mark.parametrize("position", [0, 20, 0.3, 0.6, -1])
def test_verify_finds_a_flipped_bit_and_changes_nothing(tmp_path, name, position):
    path = fill(tmp_path / "cache", codec=name)
    file = segments(path, NAMESPACES[1])[0]
    flip(file, position if isinstance(position, int) else int(position * file.stat().st_size))
    before = snapshot(path)
    bad, summary = run("verify", path, code=1).out.splitlines()
    assert bad.startswith(f"{SECOND}/{file.name}: damaged: ")
    assert (
        summary == "2 good segments with 40 rows; 1 damaged, 0 unreadable, 0 not checked, 0 set aside earlier"
    )
    told = run("verify", path, "--format", "json", code=1).json
    assert told["damaged"] == 1 and [one["file"] for one in told["files"]] == [f"{SECOND}/{file.name}"]
    assert snapshot(path) == before


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100, b"\x00" * 5000])
def test_verify_finds_garbage(path, content):
    segments(path, NAMESPACES[0])[0].write_bytes(content)
    assert run("verify", path, "--format", "json", code=1).json["damaged"] == 1


def test_verify_finds_truncation_and_says_how_many_rows_are_damaged(path):
    file = segments(path, NAMESPACES[0])[0]
    flip(file, -1)
    assert re.search(r"\d+ of 30 rows differ from what was written", run("verify", path, code=1).out)
    file.write_bytes(file.read_bytes()[:-1])
    assert run("verify", path, "--format", "json", code=1).json["damaged"] == 1


def test_verify_finds_a_segment_in_the_folder_of_another_namespace(path):
    file = segments(path, NAMESPACES[0])[0]
    file.rename(path / SECOND / file.name)
    assert f"belongs to namespace {FIRST}" in run("verify", path, code=1).out


def test_verify_mentions_what_was_set_aside_and_leaves_out_what_is_not_the_caches(path):
    file = segments(path, NAMESPACES[0])[0]
    file.rename(str(file) + ".corrupt")
    (path / FIRST / "notes.safetensors").write_bytes(b"mine")
    assert (
        "2 good segments with 30 rows; 0 damaged, 0 unreadable, 0 not checked, 1 set aside"
        in run("verify", path).out
    )


def test_a_segment_of_a_newer_format_is_not_called_damaged(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(segment, "FORMAT_VERSION", 3)
        encoded = encode([(keys_of(range(4)), rows_of(range(4), 8))], codec("none", 1))
    file = path / FIRST / (ulid() + ".safetensors")
    file.write_bytes(b"".join([encoded.head, *map(bytes, encoded.data)]))
    bad, summary = run("verify", path).out.splitlines()
    assert bad.startswith(f"{FIRST}/{file.name}: unchecked: ") and "upgrade" in bad
    assert "1 not checked" in summary


def test_a_row_that_is_larger_than_the_limit_is_not_read_and_not_called_damaged(path):
    file = segments(path, NAMESPACES[0])[0]
    assert verdict(FileSystem(), str(file), FIRST, 64 * 4).state == "good"
    found = verdict(FileSystem(), str(file), FIRST, 64 * 4 - 1)
    assert found.state == "unchecked" and "256" in found.reason
    assert verdict(FileSystem(), str(file) + "x", FIRST, 1 << 20).state == "gone"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_file_that_the_system_does_not_let_us_read_is_not_called_damaged(path, monkeypatch, code):
    file = segments(path, NAMESPACES[0])[0]
    opened = FileSystem.open

    def refuse(fs, name):
        if name == str(file):
            raise OSError(code, os.strerror(code), name)
        return opened(fs, name)

    monkeypatch.setattr(FileSystem, "open", refuse)
    bad, summary = run("verify", path, code=1).out.splitlines()
    assert bad == f"{FIRST}/{file.name}: unreadable: cannot be read: {os.strerror(code)}"
    assert "2 good segments with 30 rows; 0 damaged, 1 unreadable, 0 not checked" in summary
    told = run("verify", path, "--format", "json", code=1).json
    assert (told["damaged"], told["unreadable"]) == (0, 1)


def test_verify_names_a_namespace_whose_folder_may_not_be_read(path, monkeypatch):
    listing = FileSystem.listing

    def refuse(fs, name):
        if name == str(path / FIRST):
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return listing(fs, name)

    monkeypatch.setattr(FileSystem, "listing", refuse)
    bad, summary = run("verify", path, code=1).out.splitlines()
    assert bad == f"{FIRST}: unreadable: cannot be read: Permission denied"
    assert "0 damaged, 1 unreadable" in summary


def test_outputs_of_classes_that_are_not_imported_are_counted_and_checked(tmp_path, monkeypatch):
    module = types.ModuleType("models_of_somebody")
    module.Output = namedtuple("Output", ["hidden", "pooled"])
    module.Output.__module__, module.Output.__qualname__ = module.__name__, "Output"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    disk = tier(tmp_path / "cache")
    output = module.Output(torch.ones(4, 3), [torch.zeros(4, 2)])
    assert disk.put(keys_of(range(4)), Rows.from_pytree(output, 4, device=CPU)) == 4
    disk.close()
    monkeypatch.delitem(sys.modules, module.__name__)
    one = run("ls", tmp_path / "cache", "--format", "json").json[0]
    assert (one["rows"], one["row_bytes"], one["unreadable"]) == (4, 4 * 5 * 4, 0)
    assert "1 good segment with 4 rows" in run("verify", tmp_path / "cache").out


# prune


def test_prune_deletes_what_was_not_used_for_longest_and_says_so(path):
    sizes = {namespace: size_of_namespace(path, namespace) for namespace in (FIRST, SECOND, THIRD)}
    done = run("prune", path, "--max-size", sizes[FIRST] + sizes[SECOND])
    assert done.cells[0] == ["namespace", "class", "files", "bytes"]
    assert [line[:3] for line in done.cells[1:-1]] == [[THIRD, "train.Teacher", "2"]]
    assert done.out.splitlines()[-1].startswith("2 files deleted, ")
    assert sorted(os.listdir(path)) == sorted([LOCK, TAG, FIRST, SECOND])
    told = run("prune", path, "--max-size", sizes[FIRST], "--format", "json").json
    assert told == [{"class": "models.Encoder", "namespace": SECOND, "files": 2, "bytes": sizes[SECOND]}]
    assert sealed_names(path, range(30), 64) == list(range(30))


@pytest.mark.parametrize("uploaded", [True, False], ids=["some uploaded", "none"])
def test_prune_deletes_only_what_the_bucket_of_a_local_folder_has(path, uploaded):
    """Even if the rest is older, and nobody uses it."""
    files = sorted(path.glob("*/*.safetensors"), key=os.path.getmtime)
    there = files[-1:] if uploaded else []
    for file in there:
        write_head(FileSystem(), str(file), read_head(FileSystem(), str(file))[0])
    if not uploaded:
        (path / MIRROR).touch()  # a process has tried to upload them
    done = run("prune", path, "--max-size", "1kB", code=1)
    assert "are left, not in the bucket yet" in done.err
    assert set(path.glob("*/*.safetensors")) == set(files) - set(there)


def size_of_namespace(path, namespace):
    return sum(file.stat().st_size for file in (path / namespace).iterdir())


@pytest.mark.parametrize("size", ["1GB", "0.001TB", "1000000000", "5 MiB"])
def test_prune_leaves_what_fits(path, size):
    before = snapshot(path)
    assert run("prune", path, "--max-size", size).out == "0 files deleted, 0 B\n"
    assert snapshot(path) == before


def test_prune_to_nothing_leaves_others_files(path):
    (path / FIRST / "notes.txt").write_text("mine")
    (path / "notes.txt").write_text("mine")
    file = segments(path, NAMESPACES[1])[0]
    file.rename(str(file) + ".corrupt")
    (path / THIRD / (ulid() + ".safetensors.tmp")).write_bytes(b"a dead writer's")
    run("prune", path, "--max-size", 0)
    names = {name for name in snapshot(path) if name not in (TAG, LOCK)}
    assert names == {f"{FIRST}/notes.txt", "notes.txt"}


USER = """
import sys
from tests.helpers.storage import NAMESPACES, found
from torchcache2.tiers.disk.tier import DiskTier

disk = DiskTier(sys.argv[1])
assert found(disk, range(20), 64, NAMESPACES[1]) == list(range(20))
print("ready")
import signal
signal.pause()
"""


def test_prune_and_rm_spare_what_another_process_uses(path):
    user = start(USER, path).until("ready")
    try:
        done = run("prune", path, "--max-size", 0, code=1)
        assert [line[0] for line in done.cells[1:-1]] == [FIRST, THIRD]
        assert "in use by running processes" in done.err
        assert [line[-1] for line in run("ls", path).cells[1:]] == ["yes"]
        done = run("rm", path, SECOND, "--yes", code=1)
        assert done.out == "" and f"{SECOND} (models.Encoder) is used by a running process" in done.err
        assert len(segments(path)) == 1
    finally:
        user.send(signal.SIGKILL)
        user.wait()
    run("rm", path, SECOND, "--yes")
    assert segments(path) == []


def test_ls_tells_models_apart_and_rm_takes_all_of_a_class_but_what_is_used(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, x):
            return x * self.scale

        def encode(self, x):
            return x * self.scale

    def module(scale, **options):
        return torchcache2.torchcache(persistent_cache_dir=tmp_path, **options)(Net(scale).eval())

    used, *others = module(1, label="teacher"), module(2), module(3, methods=("encode", "forward"))
    for one in (used, *others):
        one(torch.ones(2, 4)), one.encode(torch.ones(2, 4))
        one.cache_instance.flush()
    for one in others:
        one.cache_instance.close()
    name = f"{__name__}.{Net.__qualname__}"
    titles = [f"{name} teacher", name, f"{name}.encode/forward"]
    assert sorted(line[1] for line in run("ls", tmp_path).cells[1:]) == sorted(titles)
    done = run("rm", tmp_path, name, "--unused", "--yes")
    assert [line[1] for line in done.cells[1:-1]] == [name, name]
    assert [line[1] for line in run("ls", tmp_path).cells[1:]] == titles[:1]
    run("rm", tmp_path, "teacher", "--yes", code=1)
    used.cache_instance.close()
    run("rm", tmp_path, "teacher", "--yes")


# rm


@pytest.mark.parametrize(
    ("answer", "is_deleted"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_rm_asks(path, answer, is_deleted):
    before = snapshot(path)
    done = run("rm", path, FIRST, stdin=answer, code=0 if is_deleted else 1)
    assert f"{FIRST}  models.Backbone  30 rows" in done.err and "Delete?" in done.err
    assert (FIRST in os.listdir(path)) != is_deleted
    if not is_deleted:
        assert snapshot(path) == before


def test_rm_takes_beginnings_each_once_or_all(path):
    done = run("rm", path, FIRST[:2], FIRST, SECOND, "--yes")
    assert [line[0] for line in done.cells[1:-1]] == [FIRST, SECOND]
    assert [name for name in os.listdir(path) if len(name) == 32] == [THIRD]
    told = run("rm", path, "--all", "--yes", "--format", "json").json
    assert [one["namespace"] for one in told] == [THIRD] and told[0]["files"] == 2


def test_rm_refuses_a_beginning_of_several(path):
    twin = FIRST[:12] + "0" * 20
    (path / twin).mkdir()
    before = snapshot(path)
    done = run("rm", path, FIRST[:12], "--yes", code=2)
    assert FIRST in done.err and twin in done.err
    assert snapshot(path) == before


def test_rm_deletes_the_caches_files_only(path):
    folder = path / FIRST
    (folder / "notes.txt").write_text("mine")
    (folder / (ulid() + ".safetensors.corrupt")).write_bytes(b"damaged")
    (folder / (ulid() + ".safetensors.tmp")).write_bytes(b"a dead writer's")
    (folder / "folder").mkdir()
    run("rm", path, FIRST, "--yes")
    assert sorted(os.listdir(folder)) == ["folder", "notes.txt"]
    assert sealed_names(path, range(20), 64, NAMESPACES[1]) == list(range(20))


def test_rm_with_force_deletes_under_a_living_process_which_computes_again(path):
    disk = tier(path)
    assert found(disk, [1], 64) == [1]
    run("rm", path, FIRST, "--yes", code=1)
    run("rm", path, FIRST, "--yes", "--force")
    assert FIRST not in os.listdir(path)
    assert set(found(disk, range(2, 30), 64)) <= set(range(2, 30))
    put(disk, range(40, 50), 64)
    disk.close()
    assert sealed_names(path, range(40, 50), 64) == list(range(40, 50))


def test_rm_leaves_what_a_living_process_writes(path):
    fs = FileSystem()
    living = path / FIRST / (ulid() + ".safetensors.tmp")
    file = fs.create(str(living))
    assert fs.lock(file, exclusive=True)
    run("rm", path, FIRST, "--yes", "--force")
    assert set(os.listdir(path / FIRST)) == {FINGERPRINT, living.name}


# A folder that tar carries


WRITER = """
import sys
from tests.helpers.storage import NEVER, put
from torchcache2.tiers.disk.tier import DiskTier

disk = DiskTier(sys.argv[1], delay=NEVER, description=lambda _: {"class": "models.Backbone"})
for number in range(10_000):
    put(disk, range(number * 8, number * 8 + 8), 4096)
    disk.flush()
    print("written", flush=True)
"""


def test_a_folder_that_tar_packs_while_a_process_writes_is_whole_elsewhere(tmp_path):
    path, there = tmp_path / "cache", tmp_path / "there"
    there.mkdir()
    writer = start(WRITER, path).until("written")
    try:
        before = len(segments(path))
        command = ["tar", "--exclude=*.tmp", "-cf", tmp_path / "cache.tar", "-C", path, "."]
        packed = subprocess.run(command, capture_output=True, timeout=60)
        assert packed.returncode in (0, 1)  # 1: a folder has changed while it was read
    finally:
        writer.send(signal.SIGKILL)
        writer.wait()
    subprocess.run(["tar", "-xf", tmp_path / "cache.tar", "-C", there], check=True, timeout=60)
    told = run("verify", there, "--format", "json").json
    assert told["good"] == len(segments(there)) >= before > 0 and told["rows"] == 8 * told["good"]
    assert told["files"] == [] and strange_files(there) == []
    rows = list(range(told["rows"]))
    assert sealed_names(there, rows, 4096) == rows


# A terminal


def test_a_terminal_gets_aligned_columns_and_a_bold_header(path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = run_in_terminal("ls", path)
    assert "\x1b[1m" in text and "\t" not in text
    header, *lines = plain(text).splitlines()
    assert " ".join(header.split()) == "namespace class rows bytes a row ratio age last use in use"
    assert len(lines) == 3 and {
        line.index(CLASSES[n]) for line, n in zip(lines, NAMESPACES, strict=True)
    } == {header.index("class")}
    assert re.search(r"^rows +60 *$", plain(run_in_terminal("stats", path)), re.MULTILINE)


def test_a_terminal_gets_progress_and_a_pipe_does_not(path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert "checking" in run_in_terminal("verify", path)
    assert run("verify", path).err == ""


def test_json_is_the_same_in_a_terminal(path):
    text = run_in_terminal("stats", path, "--format", "json")
    assert json.loads(text) == run("stats", path, "--format", "json").json


# The page about it


SHOWN = re.compile(r"```console\n(.*?)```", re.DOTALL)


def commands_of(text):
    """Each command of the console blocks, and what the page says that it prints."""
    for block in SHOWN.findall(text):
        for part in block.split("$ ")[1:]:
            line, _, output = part.partition("\n")
            yield line, output


def loosely(text):
    """Text without what differs between runs: sizes and ratios, names of segments and folders, and spaces."""
    text = re.sub(r"/\S+/features\b", "#", text)
    text = re.sub(r"\b\d+(\.\d+)?( [kMG]?B\b)|\b\d+\.\d+\b", "#", text)
    text = re.sub(r"\b[0-7][0-9A-HJKMNP-TV-Z]{25}\b", "#", text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def test_the_page_shows_what_a_terminal_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    now = datetime.datetime.now(datetime.timezone.utc)
    created = (now - datetime.timedelta(days=3)).isoformat()
    names = {key_of(name): name for name in CLASSES.values()}
    disk = DiskTier(
        "features",
        delay=NEVER,
        fs=Unsynced(),
        description=lambda name: {"class": names[name], "created": created},
    )
    for namespace, count, hours in zip(names, (3000, 2000, 1000), (2, 30, 50), strict=True):
        put(disk, range(count), 64, namespace)
        disk.flush()
        time = now.timestamp() - hours * 3600
        os.utime(segments("features", namespace)[0], (time, time))
    disk.close()
    shown = list(commands_of(DOCS.read_text(encoding="utf-8")))
    assert {line.split()[1] for line, _ in shown} == {"ls", "stats", "verify", "prune", "rm"}
    for line, output in shown:
        program, *arguments = line.split()
        assert program == "torchcache2"
        if " damaged: " in output:
            file = segments("features", list(names)[1])[0]
            times = file.stat().st_atime, file.stat().st_mtime
            flip(file, -1)
            os.utime(file, times)
        assert loosely(plain(run_in_terminal(*arguments))) == loosely(output), line
