"""The command line: what it prints, deletes, refuses, and lets in."""

import contextlib
import datetime
import errno
import io
import json
import os
import pty
import re
import signal
import stat
import sys
import tarfile
import threading
import types
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

import torchcache2
from tests.helpers.commands import run
from tests.helpers.storage import (
    CPU,
    NAMESPACES,
    NEVER,
    Faulty,
    Mortal,
    Short,
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
from torchcache2.cli import archive
from torchcache2.cli.archive import ArchiveError, members
from torchcache2.cli.report import verdict
from torchcache2.core.rows import Rows
from torchcache2.files import layout as segment
from torchcache2.files.codec import codec
from torchcache2.files.directory import FINGERPRINT, LOCK, TAG, CacheDirectory
from torchcache2.files.filesystem import FileSystem, ulid
from torchcache2.files.removal import claimed, remove_namespace
from torchcache2.files.segment import encode
from torchcache2.tiers.disk.tier import DiskTier

FIRST, SECOND, THIRD = (namespace.hex() for namespace in NAMESPACES)
CLASSES = {NAMESPACES[0]: "models.Backbone", NAMESPACES[1]: "models.Encoder", NAMESPACES[2]: "train.Teacher"}
CREATED = "2020-02-02T20:20:20+00:00"
DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


class NoWait(FileSystem):
    """Does not wait for the disk."""

    def sync(self, file):
        pass

    def sync_folder(self, path):
        pass


class Failing(Faulty, NoWait):
    pass


class Dying(Mortal, NoWait):
    pass


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
    return DiskTier(path, delay=NEVER, description=described, fs=NoWait(), **options)


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


COMMANDS = [
    ("ls",),
    ("stats",),
    ("verify",),
    ("prune", "--max-size", "1GB"),
    ("rm", "--all", "--yes"),
    ("export",),
]


def on(command, path, tmp_path):
    return [*command, path, *([tmp_path / "new.tar"] if command == ("export",) else [])]


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
    done = run(*on(command, path, tmp_path), code=2)
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
        (["import", "gone.tar", "new"], "gone.tar: No such file"),
        (["import", ".", "new"], ".: is not a regular file"),
        (["export", ".", "no/such/folder.tar"], "No such file"),
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
    for command in ("ls", "stats", "verify", "prune", "rm", "export", "import"):
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
        "",
        "{",
        "[]",
        "null",
        '{"class": 3}',
        '{"class": ""}',
        "[" * 100_000,
        '{"created": "yesterday"}',
        "\xff",
    ],
)
def test_a_garbled_fingerprint_hides_no_namespace(path, text):
    (path / FIRST / FINGERPRINT).write_text(text, encoding="latin-1")
    one = next(one for one in run("ls", path, "--format", "json").json if one["namespace"] == FIRST)
    assert (one["class"], one["rows"]) == ("?", 30)
    # The name of a segment says when it was written.
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(one["created"])
    assert abs(age.total_seconds()) < 3600


def test_no_fingerprint_hides_no_namespace(path):
    (path / FIRST / FINGERPRINT).unlink()
    one = next(one for one in run("ls", path, "--format", "json").json if one["namespace"] == FIRST)
    assert (one["class"], one["rows"], one["in_use"]) == ("?", 30, False)


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
    said = run("dump", path, FIRST, path.parent / "out.safetensors", code=1).out
    assert f"{file.name}: unreadable: " in said


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
    run("export", tmp_path / "cache", tmp_path / "x.tar")
    assert "1 segment with 4 rows" in run("import", tmp_path / "x.tar", tmp_path / "new").out


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


def test_a_namespace_that_comes_into_use_while_rm_asks_is_spared(path):
    directory = CacheDirectory(str(path), FileSystem())
    hold = directory.hold(NAMESPACES[0])
    before = snapshot(path / FIRST)
    assert not remove_namespace(directory, FIRST)
    assert snapshot(path / FIRST) == before
    del hold
    assert remove_namespace(directory, FIRST)
    assert not (path / FIRST).exists()
    assert remove_namespace(directory, FIRST)  # as another process may have done


def test_rm_leaves_what_a_living_process_writes(path):
    fs = FileSystem()
    living = path / FIRST / (ulid() + ".safetensors.tmp")
    file = fs.create(str(living))
    assert fs.lock(file, exclusive=True)
    run("rm", path, FIRST, "--yes", "--force")
    assert set(os.listdir(path / FIRST)) == {FINGERPRINT, living.name}


# export and import


@pytest.fixture
def exported(path, tmp_path):
    run("export", path, tmp_path / "x.tar")
    return tmp_path / "x.tar"


def test_an_export_that_is_imported_serves_every_row(path, exported, tmp_path):
    done = run("import", exported, tmp_path / "new")
    assert re.fullmatch(
        r"3 segments with 60 rows, [\d.]+ KB imported; 0 there already, 0 left out\n", done.out
    )
    for namespace, count in zip(NAMESPACES, (30, 20, 10), strict=True):
        assert sealed_names(tmp_path / "new", range(count), 64, namespace) == list(range(count))
    old, new = snapshot(path), snapshot(tmp_path / "new")
    assert old == {name: data for name, data in new.items() if name != LOCK}
    assert [one["class"] for one in run("ls", tmp_path / "new", "--format", "json").json]


def test_what_export_and_import_say_in_json(path, tmp_path):
    told = run("export", path, tmp_path / "x.tar", "--format", "json").json
    file = tmp_path / "x.tar"
    assert told == {"file": str(file), "segments": 3, "bytes": file.stat().st_size}
    told = run("import", file, tmp_path / "new", "--format", "json").json
    size = sum(file.stat().st_size for file in segments(path))
    assert told == {"segments": 3, "rows": 60, "bytes": size, "kept": 0, "files": []}
    told = run("import", file, tmp_path / "new", "--format", "json").json
    assert told == {"segments": 0, "rows": 0, "bytes": 0, "kept": 3, "files": []}


def test_an_export_is_a_plain_tar_of_a_cache_directory(path, exported, tmp_path):
    with tarfile.open(exported) as tar:
        assert all(member.isreg() and member.mode == 0o644 for member in tar)
        for member in tar.getmembers():
            target = tmp_path / "unpacked" / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(tar.extractfile(member).read())
            assert member.mtime == int((path / member.name).stat().st_mtime)
    assert snapshot(tmp_path / "unpacked") == {n: d for n, d in snapshot(path).items() if n != LOCK}


def test_an_export_has_nothing_but_fingerprints_and_segments(path, tmp_path):
    (path / FIRST / (ulid() + ".safetensors.corrupt")).write_bytes(b"damaged")
    (path / FIRST / (ulid() + ".safetensors.tmp")).write_bytes(b"a dead writer's")
    (path / FIRST / "notes.txt").write_text("mine")
    (path / "notes.txt").write_text("mine")
    os.symlink("/etc/passwd", path / FIRST / (ulid() + ".safetensors"))
    run("export", path, tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar") as tar:
        names = sorted(tar.getnames())
    assert names == sorted([TAG, *(f"{file.parent.name}/{file.name}" for file in regular(path))])


def regular(path):
    for folder in (FIRST, SECOND, THIRD):
        yield path / folder / FINGERPRINT
    yield from (file for file in segments(path) if not file.is_symlink())


def test_an_export_does_not_overwrite(path, tmp_path):
    file = tmp_path / "x.tar"
    file.write_text("mine")
    assert "exists already" in run("export", path, file, code=2).err
    assert file.read_text() == "mine"


def test_an_export_is_whole_or_not_there_wherever_it_fails(path, tmp_path):
    counted = Failing(28, first=10**9)
    archive.export(CacheDirectory(str(path), counted), str(tmp_path / "whole.tar"))
    whole = (tmp_path / "whole.tar").read_bytes()
    for number, call in enumerate(counted.calls):
        folder = tmp_path / str(number)
        folder.mkdir()
        with contextlib.suppress(OSError):
            fs = Failing(28, number, number + 1)
            archive.export(CacheDirectory(str(path), fs), str(folder / "x.tar"))
        there = snapshot(folder)
        assert there.pop("x.tar", whole) == whole
        assert not there or call == "remove"


def entry(name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar(path, *entries):
    """A tar file with these headers and bytes, whatever they say."""
    with open(path, "wb") as file:
        for info, data in entries:
            file.write(info.tobuf(tarfile.GNU_FORMAT))
            file.write(data + bytes(-len(data) % 512))
        file.write(bytes(1024))
    return path


def segment_entry(path, namespace=NAMESPACES[0], change=lambda data: data, folder=None):
    file = segments(path, namespace)[0]
    return entry(f"{folder or namespace.hex()}/{file.name}", change(file.read_bytes()))


def fingerprint_entry(namespace=FIRST, **changes):
    document = {"format_version": 2, "namespace": namespace, "class": "models.Backbone"} | changes
    return entry(f"{namespace}/{FINGERPRINT}", json.dumps(document).encode())


SEGMENT = f"{FIRST}/01ARZ3NDEKTSV4RRFFQ69G5FAV.safetensors"
NO_FILES = {
    "a parent": ("../evil", {}),
    "a parent in the middle": (f"{FIRST}/../../evil", {}),
    "a parent at the end": (f"{FIRST}/..", {}),
    "an absolute path": ("/tmp/evil", {}),
    "an absolute segment": ("/" + SEGMENT, {}),
    "a relative absolute path": (".//" + SEGMENT, {}),
    "a parent behind a dot": ("./../" + SEGMENT, {}),
    "an absolute tag": ("/" + TAG, {}),
    "a tag in a namespace": (f"{FIRST}/{TAG}", {}),
    "a double slash": (SEGMENT.replace("/", "//"), {}),
    "a deeper path": ("a/" + SEGMENT, {}),
    "a backslash": (SEGMENT.replace("/", "\\"), {}),
    "no name": ("", {}),
    "a foreign name": (f"{FIRST}/evil.py", {}),
    "a top-level name": ("evil.py", {}),
    "a newline": (SEGMENT + "\n", {}),
    "an upper-case namespace": (SEGMENT.replace(FIRST, FIRST.upper()), {}),
    "a short namespace": (SEGMENT[1:], {}),
    "a lower-case name": (SEGMENT.lower(), {}),
    "a lock in a namespace": (f"{FIRST}/{LOCK}", {}),
    "an unprintable name": (f"{FIRST}/\x1b[2J\udcff", {}),
    "a folder": ("folder", {"type": tarfile.DIRTYPE}),
    "a folder with bytes": (FIRST, {"type": tarfile.DIRTYPE, "size": 512}),
    "a folder of a segment's name": (SEGMENT, {"type": tarfile.DIRTYPE}),
    "a tag of another program": (TAG, {}),
    "a symbolic link": (SEGMENT, {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
    "a hard link": (SEGMENT, {"type": tarfile.LNKTYPE, "linkname": TAG}),
    "a character device": (SEGMENT, {"type": tarfile.CHRTYPE, "devmajor": 1}),
    "a block device": (SEGMENT, {"type": tarfile.BLKTYPE, "devmajor": 1}),
    "a pipe": (SEGMENT, {"type": tarfile.FIFOTYPE}),
    "a contiguous file": (SEGMENT, {"type": tarfile.CONTTYPE}),
    "a sparse file": (SEGMENT, {"type": tarfile.GNUTYPE_SPARSE}),
    "a long name": (SEGMENT, {"type": tarfile.GNUTYPE_LONGNAME}),
    "an extended header": (SEGMENT, {"type": tarfile.XHDTYPE}),
    "a global header": (SEGMENT, {"type": tarfile.XGLTYPE}),
    "a tag that is a link": (TAG, {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
    "a fingerprint that is a link": (f"{FIRST}/{FINGERPRINT}", {"type": tarfile.SYMTYPE, "linkname": TAG}),
    "more bytes than follow": (SEGMENT, {"size": 1 << 40}),
    "more bytes than any disk has": (SEGMENT, {"size": 1 << 80}),
    "fewer bytes than none": (SEGMENT, {"size": -512}),
}


def refused(file, target, tmp_path):
    """That a file is refused as a whole, and nothing is written anywhere."""
    before = snapshot(tmp_path)
    done = run("import", file, target, code=2)
    assert done.out == "" and done.err.startswith("torchcache2: ") and done.err.count("\n") == 1
    assert done.err.endswith("nothing was imported\n")
    assert snapshot(tmp_path) == before
    return done.err


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("target", ["new", "cache"])
def test_an_archive_with_anything_else_is_refused_as_a_whole(path, tmp_path, kind, target):
    name, fields = NO_FILES[kind]
    (path / SECOND).rename(tmp_path / "aside")  # the good one would be new
    good = [fingerprint_entry(), entry(*segment_entry_of(tmp_path / "aside"))]
    file = tar(tmp_path / "x.tar", *good, entry(name, **fields))
    refused(file, tmp_path / target, tmp_path)
    assert not (tmp_path / "new").exists()


def segment_entry_of(folder):
    file = next(folder.glob("*.safetensors"))
    return f"{SECOND}/{file.name}", file.read_bytes()


DOCUMENTS = {
    "of another namespace": json.dumps({"format_version": 2, "namespace": SECOND}).encode(),
    "of a newer format": json.dumps({"format_version": 3, "namespace": FIRST}).encode(),
    "of a format that is no number": json.dumps({"format_version": "2", "namespace": FIRST}).encode(),
    "without a namespace": b'{"format_version": 2}',
    "empty": b"",
    "no JSON": b"hello",
    "no text": b"\xff\xfe\xfd",
    "a list": b"[]",
    "nested": json.dumps({"format_version": 2, "namespace": FIRST})[:-1].encode()
    + b', "x": ' + b"[" * 200 + b"]" * 200 + b"}",
    "nested without end": b"[" * 1_000_000,
    "an endless number": json.dumps({"format_version": 2, "namespace": FIRST})[:-1].encode()
    + b', "x": ' + b"9" * 100_000 + b"}",
    "too long": json.dumps({"format_version": 2, "namespace": FIRST}).encode() + b" " * (16 << 20),
}  # fmt: skip


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_an_archive_whose_fingerprint_is_not_one_is_refused(path, tmp_path, kind):
    file = tar(tmp_path / "x.tar", entry(f"{FIRST}/{FINGERPRINT}", DOCUMENTS[kind]), segment_entry(path))
    refused(file, tmp_path / "new", tmp_path)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 1000, 5000, -10_000, -513, -512, -1])
def test_a_truncated_archive_is_refused(exported, tmp_path, size):
    data = exported.read_bytes()
    end = -(-len(data.rstrip(b"\0")) // 512) * 512  # of the last file; an empty block follows
    exported.write_bytes(data[:size] if size >= 0 else data[: end + 512 + size])
    refused(exported, tmp_path / "new", tmp_path)


def test_an_archive_may_end_after_its_first_empty_block(exported, tmp_path):
    data = exported.read_bytes()
    exported.write_bytes(data[: -(-len(data.rstrip(b"\0")) // 512) * 512 + 512])
    run("import", exported, tmp_path / "new")


@pytest.mark.parametrize(
    "content", [b"text", b"text" * 1000, b"\x1f\x8b" + bytes(range(256)) * 20, b"\xff" * 4096]
)
def test_what_is_no_tar_is_refused(tmp_path, content):
    (tmp_path / "x.tar").write_bytes(content)
    assert "tar" in refused(tmp_path / "x.tar", tmp_path / "new", tmp_path)


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_a_compressed_archive_is_refused_unread(path, tmp_path, mode):
    with tarfile.open(tmp_path / "x.tar", mode) as file:
        file.addfile(entry(TAG)[0])
    refused(tmp_path / "x.tar", tmp_path / "new", tmp_path)


def test_headers_of_noise_are_refused(exported, tmp_path):
    data, random = exported.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data)
        header = int(random.choice([0, 1024]))  # the tag's, and that of the first fingerprint
        for position in random.integers(0, 512, 3):
            changed[header + position] = random.integers(256)
        block = changed[header : header + 512]
        block[148:156] = b" " * 8
        changed[header + 148 : header + 156] = b"%06o\0 " % sum(block)  # a checksum that is right
        exported.write_bytes(changed)
        file = FileSystem().open(str(exported))
        with contextlib.suppress(ArchiveError):
            for name in members(FileSystem(), file):
                assert re.fullmatch(r"([0-9a-f]{32})?", name.namespace) and "/" not in name.name


def flipped(data):
    changed = bytearray(data)
    changed[-1] ^= 1
    return bytes(changed)


CHANGES = {
    "flipped": flipped,
    "truncated": lambda data: data[:-1],
    "empty": lambda data: b"",
    "garbage": lambda data: b"garbage" * 100,
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_damaged_segment_is_left_out_and_the_others_come(path, tmp_path, change):
    bad, good = segment_entry(path, NAMESPACES[0], change), segment_entry(path, NAMESPACES[1])
    file = tar(tmp_path / "x.tar", fingerprint_entry(), bad, fingerprint_entry(SECOND), good)
    done = run("import", file, tmp_path / "new", code=1)
    assert done.out.startswith(f"{bad[0].name}: damaged: ")
    assert "1 segment with 20 rows" in done.out and "1 left out" in done.out
    told = run("import", file, tmp_path / "new", "--format", "json", code=1).json
    assert (told["kept"], told["files"][0]["file"]) == (1, bad[0].name)
    assert [file.name for file in segments(tmp_path / "new")] == [good[0].name.split("/")[1]]
    assert strange_files(tmp_path / "new") == []


def test_a_segment_in_the_folder_of_another_namespace_is_left_out(path, tmp_path):
    file = tar(tmp_path / "x.tar", fingerprint_entry(), segment_entry(path, NAMESPACES[1], folder=FIRST))
    assert f"belongs to namespace {SECOND}" in run("import", file, tmp_path / "new", code=1).out
    assert segments(tmp_path / "new") == []


def test_of_two_files_with_one_name_the_first_good_one_counts(path, tmp_path):
    good, bad = segment_entry(path), segment_entry(path, change=flipped)
    file = tar(tmp_path / "x.tar", fingerprint_entry(), good, bad)
    assert "1 there already, 0 left out" in run("import", file, tmp_path / "one").out
    file = tar(tmp_path / "y.tar", fingerprint_entry(), bad, good)
    assert "0 there already, 1 left out" in run("import", file, tmp_path / "two", code=1).out
    for name in ("one", "two"):
        assert sealed_names(tmp_path / name, range(30), 64) == list(range(30))


def test_what_is_there_stays_as_it_is(path, exported, tmp_path):
    (path / FIRST / FINGERPRINT).write_text('{"class": "mine"}')
    segments(path, NAMESPACES[0])[0].write_bytes(b"mine")
    before = snapshot(path)
    assert "3 there already" in run("import", exported, path).out
    assert snapshot(path) == before


def test_an_archive_does_not_say_what_the_directory_is(path, tmp_path):
    text = b"#!/bin/sh\nevil\n# This folder is a cache of torchcache2, format 2\n" + bytes(1 << 20)
    file = tar(tmp_path / "x.tar", entry(TAG, text), fingerprint_entry(), segment_entry(path))
    run("import", file, tmp_path / "new")
    assert (tmp_path / "new" / TAG).read_bytes() == (path / TAG).read_bytes()


def test_a_namespace_without_a_fingerprint_gets_one(path, tmp_path):
    run("import", tar(tmp_path / "x.tar", segment_entry(path)), tmp_path / "new")
    document = json.loads((tmp_path / "new" / FIRST / FINGERPRINT).read_text())
    assert document == {"format_version": 2, "namespace": FIRST}
    assert sealed_names(tmp_path / "new", range(30), 64) == list(range(30))


def test_an_import_brings_back_what_was_set_aside(path, exported):
    file = segments(path, NAMESPACES[0])[0]
    file.rename(str(file) + ".corrupt")
    assert "1 segment with 30 rows" in run("import", exported, path).out
    assert sealed_names(path, range(30), 64) == list(range(30))


@pytest.mark.parametrize(
    ("kind", "sentence"), [("file", "is a file"), ("foreign", "not empty"), ("newer", "Upgrade")]
)
def test_an_import_goes_into_a_cache_directory_only(path, exported, tmp_path, kind, sentence):
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("mine")
    elif kind == "foreign":
        target.mkdir()
        (target / "thesis.tex").write_text("mine")
    else:
        target.mkdir()
        (target / TAG).write_text((path / TAG).read_text().replace("format 2", "format 3"))
    before = snapshot(tmp_path)
    assert sentence in run("import", exported, target, code=2).err
    assert snapshot(tmp_path) == before


def imported(file, path, fs):
    return archive.import_archive(str(file), CacheDirectory(str(path), fs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fails", "dies"])
def test_an_import_leaves_whole_segments_only_wherever_it_ends_and_can_be_done_again(tmp_path, kind):
    fill(tmp_path / "cache", (3, 2))
    file = tmp_path / "x.tar"
    run("export", tmp_path / "cache", file)
    counted = Dying()
    imported(file, tmp_path / "whole", counted)
    whole = snapshot(tmp_path / "whole")
    for number in range(len(counted.calls)):
        target = tmp_path / str(number)
        fs = Failing(28, number, number + 1) if kind == "fails" else Dying(number)
        with contextlib.suppress(OSError):
            imported(file, target, fs)
        if target.exists():
            there = {name: data for name, data in snapshot(target).items() if not is_temporary(name)}
            assert there.items() <= whole.items()
        imported(file, target, NoWait())
        tier(target).close()  # a handle that opens deletes what is left
        assert snapshot(target) == whole


def is_temporary(name):
    return name.endswith(".tmp") or re.search(r"\.[0-9A-Z]{26}$", name) is not None


def test_files_are_read_and_written_in_pieces(path, tmp_path):
    fs = Short(1000)
    archive.export(CacheDirectory(str(path), fs), str(tmp_path / "x.tar"))
    done = archive.import_archive(str(tmp_path / "x.tar"), CacheDirectory(str(tmp_path / "new"), fs))
    assert (done.segments, done.rows) == (3, 60)
    assert sealed_names(tmp_path / "new", range(30), 64) == list(range(30))


def test_a_namespace_is_in_use_while_it_is_imported(exported, tmp_path):
    seen = []

    class Asks(FileSystem):
        def rename(self, old, new):
            directory = CacheDirectory(str(tmp_path / "new"), FileSystem())
            with claimed(directory, Path(new).parent.name) as claim:
                seen.append(claim)
            super().rename(old, new)

    archive.import_archive(str(exported), CacheDirectory(str(tmp_path / "new"), Asks()))
    assert seen == [False] * 3


def test_imported_files_have_the_rights_of_new_files(exported, tmp_path):
    run("import", exported, tmp_path / "new")
    (tmp_path / "file").write_text("")
    mode = stat.S_IMODE((tmp_path / "file").stat().st_mode)
    assert {stat.S_IMODE(file.stat().st_mode) for file in segments(tmp_path / "new")} == {mode}


# A terminal


def test_a_terminal_gets_aligned_columns_and_a_bold_header(path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = run_in_terminal("ls", path)
    assert "\x1b[1m" in text and "\t" not in text
    header, *lines = plain(text).splitlines()
    assert header.split() == [
        "namespace",
        "class",
        "rows",
        "bytes",
        "a",
        "row",
        "ratio",
        "age",
        "last",
        "use",
        "in",
        "use",
    ]
    assert len(lines) == 3 and {
        line.index(CLASSES[n]) for line, n in zip(lines, NAMESPACES, strict=True)
    } == {header.index("class")}
    assert re.search(r"^rows +60 *$", plain(run_in_terminal("stats", path)), re.MULTILINE)


def test_a_terminal_gets_progress_and_a_pipe_does_not(path, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert "checking" in run_in_terminal("verify", path)
    assert "exporting" in run_in_terminal("export", path, tmp_path / "x.tar")
    assert "importing" in run_in_terminal("import", tmp_path / "x.tar", tmp_path / "new")
    for command in (
        ["verify", path],
        ["export", path, tmp_path / "y.tar"],
        ["import", tmp_path / "y.tar", path],
    ):
        assert run(*command).err == ""


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
    text = re.sub(r"\b\d+(\.\d+)?( [KMG]?B\b)|\b\d+\.\d+\b", "#", text)
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
        fs=NoWait(),
        description=lambda name: {"class": names[name], "created": created},
    )
    for namespace, count, hours in zip(names, (3000, 2000, 1000), (2, 30, 50), strict=True):
        put(disk, range(count), 64, namespace)
        disk.flush()
        time = now.timestamp() - hours * 3600
        os.utime(segments("features", namespace)[0], (time, time))
    disk.close()
    shown = list(commands_of(DOCS.read_text(encoding="utf-8")))
    assert {line.split()[1] for line, _ in shown} == {
        "ls",
        "stats",
        "verify",
        "prune",
        "rm",
        "export",
        "import",
        "dump",
    }
    for line, output in shown:
        program, *arguments = line.split()
        assert program == "torchcache2"
        if " damaged: " in output:
            file = segments("features", list(names)[1])[0]
            times = file.stat().st_atime, file.stat().st_mtime
            flip(file, -1)
            os.utime(file, times)
        assert loosely(plain(run_in_terminal(*arguments))) == loosely(output), line
