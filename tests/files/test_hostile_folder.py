"""A cache directory at the hands of others: what is no file, too few files that may be open, strange tags,
and namespaces that another user has made."""

import contextlib
import errno
import gc
import os
import resource
import shutil
import signal
import stat
import tempfile
import threading
import time
import traceback
from pathlib import Path

import pytest

from tests.helpers.storage import (
    NAMESPACES,
    NEVER,
    Unsynced,
    Watched,
    flip,
    found,
    put,
    refuse,
    seal,
    sealed_names,
    segments,
    snapshot,
    warnings_of,
)
from torchcache2 import OptionError, torchcache
from torchcache2.cli.commands import run
from torchcache2.core.errors import NewerFormatError
from torchcache2.files.directory import FINGERPRINT, LOCK, TAG, TAG_TEXT, CacheDirectory
from torchcache2.files.filesystem import Descriptors, FileSystem, StrangeFileError, most_open, ulid
from torchcache2.files.removal import deleting
from torchcache2.tiers.disk import index as located_module
from torchcache2.tiers.disk.tier import DiskTier

A, B, C = NAMESPACES
ROWS = list(range(5))
NAME = "01ARZ3NDEKTSV4RRFFQ69G5FAV.safetensors"
KINDS = [
    *("pipe", "link to a pipe", "socket", "link to a device", "link to standard input"),
    *("folder", "link to nothing", "loop of links"),
]


@pytest.fixture(autouse=True)
def _never_hangs(monkeypatch):
    """Whoever flushes writes, so that an alarm ends whatever waits without end."""

    def ring(*_):
        raise AssertionError("this has waited for a file")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(located_module, "_LOOK_EVERY", 0.0)
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def strange(kind, path, folder):
    """Make what is no file; says whether it is still the same."""
    other = folder / "other"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a pipe":
        os.mkfifo(other)
        path.symlink_to(other)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "folder":
        path.mkdir()
    else:
        targets = {"link to a device": "/dev/zero", "link to standard input": "/dev/stdin"}
        path.symlink_to({**targets, "link to nothing": other}.get(kind, path))
    before = os.lstat(path)
    return lambda: os.path.samestat(os.lstat(path), before)


def fill(path, namespaces=(A,)):
    tier = DiskTier(path, codec="none", delay=NEVER, fs=Unsynced())
    for namespace in namespaces:
        seal(tier, ROWS, namespace=namespace)
    tier.close()


def handle(path, *args, **options):
    return DiskTier(path, *args, **{"codec": "none", "delay": NEVER, "fs": Unsynced()} | options)


def command(*arguments, capfd):
    """Exit code, and what was printed."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as done:
        run([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    return done.value.code, out + err


# What is no file


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(tmp_path, kind):
    strange(kind, tmp_path / "thing", tmp_path)
    fs = FileSystem()
    with pytest.raises(StrangeFileError, match="thing"):
        fs.open(str(tmp_path / "thing"))
    with pytest.raises(FileExistsError):
        fs.create(str(tmp_path / "thing"))
    assert fs.exists(str(tmp_path / "thing")) and not fs.is_file(str(tmp_path / "thing"))


def test_a_link_to_a_regular_file_is_opened_and_nothing_is_inherited(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    file = FileSystem().open(str(tmp_path / "link"))
    assert FileSystem().size(file) == 7 and not os.get_inheritable(file.number)
    with pytest.raises(FileNotFoundError):
        FileSystem().open(str(tmp_path / "nothing"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fingerprint_that_is_no_file(path, tmp_path, log, capfd, kind):
    fill(path, (A, B))
    (path / A.hex() / FINGERPRINT).unlink()
    is_there = strange(kind, path / A.hex() / FINGERPRINT, tmp_path)
    tier = handle(path)
    assert found(tier, ROWS) == ROWS
    put(tier, ["new"])
    put(tier, ["new"], namespace=B)
    tier.close()
    assert tier.stats().faults == 1
    (warning,) = warnings_of(log)
    assert A.hex() in warning.getMessage() and "is not a regular file" in warning.getMessage()
    assert sealed_names(path, ["new"], namespace=B) == ["new"]
    for arguments in (["ls"], ["stats"], ["verify"], ["prune", "--max-size", "1GB"]):
        code, text = command(arguments[0], *arguments[1:], path, capfd=capfd)
        assert code == 0, text
    assert command("prune", "--max-size", "1B", path, capfd=capfd)[0] == 0
    assert command("rm", path, "--yes", A.hex(), capfd=capfd)[0] in (0, 2)
    assert is_there()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tag_that_is_no_file(path, tmp_path, capfd, kind):
    fill(path)
    before = snapshot(path / A.hex())
    (path / TAG).unlink()
    is_there = strange(kind, path / TAG, tmp_path)
    with pytest.raises(OptionError, match=f"not empty.*{TAG}"):
        DiskTier(path)
    with pytest.raises(OptionError, match=f"not empty.*{TAG}"):
        torchcache(lambda x: x, persistent=True, persistent_cache_dir=path)
    for arguments in (["ls"], ["stats"], ["verify"], ["prune", "--max-size", "1B"]):
        code, text = command(arguments[0], *arguments[1:], path, capfd=capfd)
        assert code == 2 and "is not a cache directory" in text
    assert is_there() and snapshot(path / A.hex()) == before


def test_a_tag_that_a_power_cut_has_left_empty_is_written_again(path, log):
    fill(path)
    (path / TAG).write_bytes(b"")
    tier = handle(path)
    assert found(tier, ROWS, namespace=A) == sorted(ROWS)
    tier.close()
    assert (path / TAG).read_text() == TAG_TEXT and warnings_of(log) == []
    (path / TAG).write_bytes(b"")
    (path / "notes").write_text("mine")
    with pytest.raises(OptionError, match=r"not empty.*notes"):
        handle(path)


@pytest.mark.parametrize("kind", [*KINDS, "link to a file"])
def test_a_lock_that_is_no_file(path, tmp_path, log, capfd, kind):
    fill(path)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    if kind == "link to a file":
        (path / LOCK).symlink_to(mine)  # it would be locked, and older versions of the lock empty it
    else:
        strange(kind, path / LOCK, tmp_path)
    before = os.lstat(path / LOCK)
    with pytest.raises(StrangeFileError):
        deleting(CacheDirectory(str(path), FileSystem()))
    tier = handle(path, 1000, "lru")
    put(tier, range(50, 60), namespace=B)
    tier.close()
    assert tier.stats().faults >= 1 and len(warnings_of(log)) == 1
    assert sealed_names(path, ROWS) == ROWS
    code, text = command("prune", "--max-size", "1B", path, capfd=capfd)
    assert code == 2 and f"{LOCK}: is not a regular file" in text
    assert os.path.samestat(os.lstat(path / LOCK), before) and mine.read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_other_names_of_ours_that_are_no_files(path, tmp_path, log, capfd, kind):
    fill(path)
    names = [
        *(A.hex() + "/" + NAME + suffix for suffix in ("", ".corrupt", ".tmp")),
        *(f"{A.hex()}/{FINGERPRINT}.{ulid()}", f"{TAG}.{ulid()}"),
    ]
    if kind != "folder":  # that would be a namespace
        names.append("0" * 32)
    there = []
    for number, name in enumerate(names):
        (tmp_path / str(number)).mkdir()
        if not (kind == "folder" and name.startswith(TAG)):  # the directory would be somebody else's
            there.append(strange(kind, path / name, tmp_path / str(number)))
    tier = handle(path)
    assert found(tier, ROWS) == ROWS
    seal(tier, ["new"])
    tier.close()
    files = [file for file in (path / A.hex()).iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    stats = tier.stats()
    assert (stats.bytes, stats.corrupt, stats.faults) == (size, 0, 0)
    for arguments in (["ls"], ["stats"], ["verify"]):
        assert command(*arguments, path, capfd=capfd)[0] == 0
    tier = handle(path)
    tier.drop(A)
    tier.close()
    assert command("prune", "--max-size", "1B", path, capfd=capfd)[0] == 0
    assert all(is_there() for is_there in there) and warnings_of(log) == []
    assert not any(file.is_file() for file in segments(path))


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "folder", "link to nothing", "loop of links"])
def test_a_damaged_segment_whose_new_name_is_taken_stays(path, tmp_path, log, kind):
    fill(path)
    (file,) = segments(path)
    flip(file, 100)
    is_there = strange(kind, Path(f"{file}.corrupt"), tmp_path)
    tier = handle(path)
    for _ in range(3):
        assert found(tier, ROWS) == []
    assert tier.stats().corrupt == 1 and len(warnings_of(log)) == 1
    seal(tier, ROWS)
    tier.close()
    assert is_there() and file.exists() and sealed_names(path, ROWS) == ROWS


# Files that are open


@pytest.fixture
def limit():
    """Sets how many files may be open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # to list them takes one
    try:
        return len(os.listdir("/proc/self/fd"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def many(path, count, namespaces=1):
    """Segments of one row each."""
    tier = handle(path, in_use=lambda: ())
    names = [(number, 0) for number in range(count)]
    for number in range(namespaces):
        for name in names:
            seal(tier, [name], namespace=number.to_bytes(16, "big"))
    tier.close()
    return names


ZERO = bytes(16)


@pytest.mark.parametrize(("may_be", "most"), [(-1, 512), (7, 4), (800, 100), (10**6, 512)])
def test_an_eighth_of_the_files_that_may_be_open_is_for_segments(monkeypatch, may_be, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (may_be, may_be))
    assert most_open() == most


def test_all_tiers_of_a_process_have_few_files_open(path, limit):
    names = many(path, 100)
    Descriptors.spare()
    before = open_files()  # the runner's own: some twenty, more where several processes run tests
    limit(512)
    tiers = [handle(path) for _ in range(8)]
    for tier in tiers:
        assert found(tier, names, namespace=ZERO) == names
    assert 64 <= open_files() - before <= 512 // 4
    limit(256)  # by the user, in the middle
    for tier in tiers:
        assert found(tier, names, namespace=ZERO) == names
    assert open_files() - before <= 256 // 4
    limit(before + 14)
    assert found(tiers[0], names, namespace=ZERO) == names
    assert open_files() - before <= 2 * max(4, (before + 14) // 8) + 2
    limit(512)
    for tier in tiers:
        tier.close()
    assert open_files() <= before + 1


@contextlib.contextmanager
def hogged():
    """All files that may be open are, by the user's own program."""
    files = []
    try:
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE
    try:
        yield files
    finally:
        for file in files:
            os.close(file)


def test_a_program_that_has_used_up_its_files(path, limit, log):
    names = many(path, 40)
    limit(open_files() + 100)
    tier = handle(path)
    assert found(tier, names[:20], namespace=ZERO) == names[:20]
    with hogged():  # what the cache has open is enough for all of this
        assert found(tier, names, namespace=ZERO) == names
        seal(tier, ["new"], namespace=ZERO)
        assert tier.stats().faults == 0
    with hogged():
        assert Descriptors.spare() and Descriptors.spare() and not Descriptors.spare()
        with hogged():
            assert found(tier, names, namespace=ZERO) == []
            put(tier, ["lost"], namespace=ZERO)
            tier.flush()
        assert tier.stats().faults >= 2 and len(warnings_of(log)) == 1
    assert found(tier, names, namespace=ZERO) == names
    tier.close()


# Tags and paths


@pytest.mark.parametrize("first", ["get", "put", "drop"])
@pytest.mark.parametrize("digits", ["9" * 6000, "1", "3", "0", "1" + "0" * 30, "0" * 5000 + "1"])
def test_a_tag_of_a_format_that_is_not_known(path, log, capfd, digits, first):
    fill(path)
    (path / TAG).write_text((path / TAG).read_text().replace("format 2", f"format {digits}"))
    before = snapshot(path)
    with pytest.raises(NewerFormatError, match="Upgrade"):
        CacheDirectory(str(path), FileSystem()).check()
    tier = handle(path, 1, "lru")
    if first == "put":
        put(tier, ["new"])
    elif first == "drop":
        tier.drop(A)
    assert found(tier, ROWS) == [] and put(tier, ["new"]) == 0
    tier.flush()
    tier.drop(A)
    tier.close()
    stats = tier.stats()
    assert stats.corrupt == stats.faults == stats.evictions == 0
    assert len(warnings_of(log)) == 1 and len(warnings_of(log)[0].getMessage()) < 1000
    for arguments in (["ls"], ["stats"], ["verify"], ["prune", "--max-size", "1B"]):
        code, text = command(arguments[0], *arguments[1:], path, capfd=capfd)
        assert code == 2 and "Upgrade" in text
    assert {name: data for name, data in snapshot(path).items() if name != LOCK} == before


PATHS = {
    "a NUL": "a\0b",
    "half a character": "a\ud800b",
    "a long name": "a" * 300,
    "a long path": "a/" * 3000,
    "below a file": "file/below",
    "a loop of links": "loop",
    "below a loop": "loop/below",
}


@pytest.mark.parametrize("kind", PATHS)
def test_a_path_that_cannot_be_is_a_mistake_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("loop").symlink_to("loop")
    for where in (PATHS[kind], Path(PATHS[kind])):
        with pytest.raises(OptionError, match=r"persistent_cache_dir|/tmp|\'/"):
            torchcache(lambda x: x, persistent=True, persistent_cache_dir=where)
    assert sorted(os.listdir()) == ["file", "loop"]


# Namespaces that cannot be written


class Forbidden(Watched):
    """Some namespaces are another user's."""

    def __init__(self, *namespaces, code=errno.EACCES):
        super().__init__()
        self.texts = [namespace.hex() for namespace in namespaces]
        self.code = code
        self.tries = 0

    def before(self, number, name, args):
        changes = name in ("create", "link", "rename", "remove", "remove_folder", "make_folder")
        if changes and any(text in str(args[0]) for text in self.texts):
            self.tries += 1
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ENOTDIR])
def test_a_namespace_that_cannot_be_written_is_alone(path, log, code):
    fill(path, (A, B))
    fs = Forbidden(A, code=code)
    tier = handle(path, fs=fs)
    for number in range(5):
        put(tier, [("lost", number)], namespace=A)
        seal(tier, [("kept", number)], namespace=B)
        seal(tier, [("kept", number)], namespace=C)
    assert found(tier, ROWS, namespace=A) == ROWS
    tier.close()
    assert 1 <= tier.stats().faults <= 4 and fs.tries <= 8
    first, *rest = warnings_of(log)
    assert str(path / A.hex()) in first.getMessage()
    passes = code in (errno.EIO, errno.ENOTDIR)
    assert [record.getMessage() for record in rest] == [
        f"rows that could not be written to {path}: 1"
    ] * passes
    for namespace in (B, C):
        assert len(sealed_names(path, [("kept", n) for n in range(5)], namespace=namespace)) == 5


def test_a_namespace_is_written_again_when_it_can_be(path, log, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    fill(path)
    fs = Forbidden(A)
    tier = handle(path, fs=fs)
    put(tier, ["first"])
    tier.flush()
    assert put(tier, ["second"]) == 0  # not tried
    fs.texts = []
    now[0] += 61
    seal(tier, ["third"])
    tier.close()
    assert sealed_names(path, ["first", "second", "third"]) == ["third"] and len(warnings_of(log)) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_everybodys(path, log, code):
    fs = Forbidden(A, code=code)
    tier = handle(path, fs=fs)
    for _ in range(3):
        put(tier, ["lost"], namespace=A)
        tier.flush()
    assert put(tier, ["not tried"], namespace=B) == 0
    tier.close()
    assert len(warnings_of(log)) == 2  # the fault, and how many rows are lost


def test_rows_of_a_namespace_that_cannot_be_deleted_do_not_come_back(path, log):
    fill(path, (A, B))
    tier = handle(path, fs=Forbidden(A))
    assert found(tier, ROWS) == ROWS
    tier.drop(A)
    for _ in range(3):
        assert found(tier, ROWS) == []
    assert found(tier, ROWS, namespace=B) == ROWS and tier.stats().faults == 1
    tier.close()
    assert sealed_names(path, ROWS) == ROWS  # to others


def test_room_that_only_another_user_could_make(path, log):
    fill(path, (A,))
    tier = handle(path, sum(f.stat().st_size for f in path.rglob("*")) + 10, fs=Forbidden(A))
    put(tier, range(100), namespace=B)
    tier.close()
    assert [("is full" in record.getMessage()) for record in warnings_of(log)] == [True]
    assert sealed_names(path, ROWS) == ROWS


def forked(function, uid=0, gid=0, groups=(), umask=0o022):
    """Call a function in a child, as another user."""
    gc.collect()  # a child is refused the address space of what other tests have left
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)
            os.umask(umask)
            if uid:
                os.setgroups(list(groups))
                os.setgid(gid)
                os.setuid(uid)
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def shared():
    """A folder that other users may reach."""
    top = tempfile.mkdtemp()
    os.chmod(top, 0o755)
    yield Path(top)
    shutil.rmtree(top)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root becomes other users")
ONE, TWO, GROUP = 65534, 65533, 65500


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o700], ids=["to be read", "closed"])
def test_two_users_of_one_folder_without_a_group(shared, log, mode):
    shared.chmod(0o777)
    path = shared / "cache"

    def one():
        fill(path, (A,))
        (path / A.hex() / f"{NAME}.tmp").write_bytes(b"of a dead writer")
        (path / f"{TAG}.{ulid()}").write_bytes(b"of a dead writer")
        (path / A.hex()).chmod(mode)
        path.chmod(0o777)

    def two():
        tier = handle(path, 10**6, fs=FileSystem())
        assert found(tier, ROWS) == (ROWS if mode == 0o755 else [])
        put(tier, ["lost"], namespace=A)
        seal(tier, ["kept"], namespace=B)
        seal(tier, ["kept"], namespace=C)
        tier.close()
        for namespace in (B, C):
            assert sealed_names(path, ["kept"], namespace=namespace) == ["kept"]
        texts = [record.getMessage() for record in warnings_of(log)]
        assert len([text for text in texts if "cannot be written" in text]) == 1, texts
        assert str(path / A.hex()) in texts[0]

    forked(one, ONE, ONE)
    forked(two, TWO, TWO)
    assert sealed_names(path, ROWS) == ROWS


@needs_root
def test_a_group_shares_a_folder(shared, log):
    """As docs/persistence.md says: the group's bit on the folder, and umask 002."""
    path = shared / "cache"
    path.mkdir()
    os.chown(path, 0, GROUP)
    path.chmod(0o2770)

    def one():
        fill(path, (A, B))
        with deleting(CacheDirectory(str(path), FileSystem())):
            pass

    def two():
        tier = handle(path, fs=FileSystem())
        assert found(tier, ROWS) == ROWS
        seal(tier, [100], namespace=A)  # beside the other one's
        tier.drop(B)
        tier.close()
        assert segments(path, B) == []
        with deleting(CacheDirectory(str(path), FileSystem())):
            pass
        assert warnings_of(log) == []

    forked(one, ONE, ONE, [GROUP], 0o002)
    forked(two, TWO, TWO, [GROUP], 0o002)
    for file in path.rglob("*"):
        status = file.stat()
        expected = 0o2775 if file.is_dir() else 0o664
        assert (status.st_gid, stat.S_IMODE(status.st_mode)) == (GROUP, expected), file
    assert sealed_names(path, [*ROWS, 100]) == [*ROWS, 100]
