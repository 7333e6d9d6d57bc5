"""Without a directory, rows go to a temporary one: it goes when the run ends, however it ends."""

import gc
import os
import signal

import pytest
import torch
from torch import nn

from tests.helpers import warm
from tests.helpers.storage import wait_until
from torchcache2 import torchcache

PRELUDE = """
import os, sys, time
import torch
from torch import nn
from torchcache2 import torchcache

torch.set_num_threads(1)


def make():
    @torchcache(persistent=True, max_memory_cache_size=0, max_persistent_cache_size="1MB", compression="none")
    class Net(nn.Module):
        def forward(self, x):
            return x * 2

    return Net()


def check(net, first=0):
    x = torch.arange(2000.0).view(20, 100) + first / 64
    assert torch.equal(net(x), x * 2)


def ready():
    print("ready", flush=True)


def wait_for(name):
    end = time.monotonic() + 50
    while not os.path.exists(os.path.join(os.environ["HERE"], name)):
        assert time.monotonic() < end
        time.sleep(0.002)


def hits(net):
    return net.cache_instance.stats().hits


net = make()
"""


@pytest.fixture
def start(tmp_path):
    """Start a script whose temporary folder is `tmp_path / "tmp"`."""
    (tmp_path / "tmp").mkdir()

    def start(text, **options):
        env = {"TMPDIR": str(tmp_path / "tmp"), "HERE": str(tmp_path)}
        return warm.start(PRELUDE + warm.dedented(text), env=env, **options)

    return start


@pytest.fixture
def folders(tmp_path):
    """The temporary folders that there are."""
    return lambda: sorted(path.name for path in (tmp_path / "tmp").iterdir())


USED = """
    for _ in range(2):
        for first in range(5):
            check(net, first)
    net.cache_instance.flush()
    assert os.path.isdir(net.cache_instance.cache_dir)
    assert str(net.cache_instance.cache_dir).startswith(os.environ["TMPDIR"])
    assert len(os.listdir(os.environ["TMPDIR"])) == 1
    assert hits(net) == 100  # from the disk: there is no room in memory
    check(net, 100)
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 1),
        ("net.cache_instance.close(); assert os.listdir(os.environ['TMPDIR']) == []; check(net)", 0),
        ("net.cache_instance.clear()", 0),
        ("import atexit; atexit.register(check, net)", 0),
        ("other = make(); check(other); assert len(os.listdir(os.environ['TMPDIR'])) == 2", 0),
    ],
)
def test_a_run_leaves_nothing(start, folders, last, code):
    start(USED + f"\n    {last}\n").done(code)
    assert folders() == []


@pytest.mark.slow
def test_the_end_of_the_interpreter_leaves_nothing(start, folders):
    process = start(USED + "    net.itself = net\n    1 / 0", whole=True).done(1)
    assert folders() == [] and "torchcache2" not in process.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_run_removes_what_a_killed_one_has_left(start, folders, number):
    process = start(USED + "    ready()\n    time.sleep(50)").until("ready")
    process.send(number)
    assert process.wait() == -number
    assert len(folders()) == 1
    start("print(len(os.listdir(os.environ['TMPDIR'])))").done()  # it does not use one
    assert len(folders()) == 1
    start(USED).done()
    assert folders() == []


CHILDREN = """
    import multiprocessing
    check(net)
    net.cache_instance.flush()


    def work(ends):
        check(net)
        check(net, 1000)
        net.cache_instance.flush()
        check(net, 1000)
        assert hits(net) >= 40
        ends()


    for ends in (lambda: sys.exit(0), lambda: os._exit(0)):
        pid = os.fork()
        if pid == 0:
            work(ends)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.path.isdir(net.cache_instance.cache_dir)
    child = multiprocessing.get_context("fork").Process(target=work, args=(lambda: None,))
    child.start()
    child.join(30)
    assert child.exitcode == 0 and os.path.isdir(net.cache_instance.cache_dir)
    before = hits(net)
    check(net)
    assert hits(net) == before + 20
"""


def test_a_child_leaves_the_folder_to_its_parent(start, folders):
    start(CHILDREN).done()
    assert folders() == []


OWN = """
    import multiprocessing


    def work():
        check(net)
        net.cache_instance.flush()
        assert len(os.listdir(os.environ["TMPDIR"])) == 1


    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert os.listdir(os.environ["TMPDIR"]) == []
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.listdir(os.environ["TMPDIR"]) == []
"""


def test_a_child_removes_a_folder_of_its_own(start, folders):
    start(OWN).done()
    assert folders() == []


ORPHAN = """
    check(net)
    net.cache_instance.flush()
    pid = os.fork()
    if pid == 0:
        ready()
        wait_for("orphaned")
        before = hits(net)
        for first in (0, 500, 500):  # found if the folder is there, else computed
            check(net, first)
        net.cache_instance.flush()
        check(net, 1000)
        print("hits", hits(net) - before, flush=True)
        wait_for("end")
        with open(os.path.join(os.environ["HERE"], "ended"), "w"):
            os._exit(0)
    {last}
"""


def test_the_folder_stays_while_a_child_of_a_killed_run_uses_it(start, folders, tmp_path):
    process = start(ORPHAN.replace("{last}", "time.sleep(50)")).until("ready")
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (folder,) = folders()
    start("check(net)").done()
    assert folders() == [folder]
    (tmp_path / "orphaned").touch()
    wait_until(lambda: "hits 40\n" in process.out)
    (tmp_path / "end").touch()
    wait_until((tmp_path / "ended").exists)
    wait_until(lambda: start("check(net)").done() and folders() == [])


def test_a_child_goes_on_when_its_parent_has_removed_the_folder(start, folders, tmp_path):
    process = start(ORPHAN.replace("{last}", "")).until("ready").done()
    assert folders() == []
    (tmp_path / "orphaned").touch()
    (tmp_path / "end").touch()
    wait_until(lambda: "hits" in process.out)
    wait_until((tmp_path / "ended").exists)
    assert "Traceback" not in process.err


def test_folders_of_others_stay(start, tmp_path):
    tmp = tmp_path / "tmp"
    (tmp / "torchcache2-results").mkdir()
    (tmp / "torchcache2-results" / "table.csv").write_text("a, b")
    (tmp / "torchcache2-empty").mkdir()
    (tmp / "torchcache2-file").write_text("text")
    (tmp / "torchcache2-photos").mkdir()
    (tmp / "torchcache2-photos" / ".alive").write_text("")
    (tmp / "torchcache2-photos" / "one.jpg").write_text("a photo")
    (tmp / "torchcache2-folder" / ".alive").mkdir(parents=True)
    (tmp / "torchcache2-pipe").mkdir()
    os.mkfifo(tmp / "torchcache2-pipe" / ".alive")
    (tmp / "another-one").mkdir()
    (tmp / "another-one" / ".alive").write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".alive").write_text("")
    (elsewhere / "cache").mkdir()
    (tmp / "torchcache2-link").symlink_to(elsewhere)
    if os.getuid() == 0:
        (tmp / "torchcache2-somebody").mkdir()
        (tmp / "torchcache2-somebody" / ".alive").write_text("")
        os.chown(tmp / "torchcache2-somebody", 12345, 12345)
    before = sorted(tmp_path.rglob("*"))
    start("check(net)").done()
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_temporary_folder_rows_stay_in_memory(start, folders):
    text = """
        import tempfile
        tempfile.tempdir = os.path.join(os.environ["TMPDIR"], "deleted since")
        net.torchcache_max_memory_cache_size = 10**8
        for _ in range(2):
            check(net)
        assert hits(net) == 20
        net.cache_instance.flush()
        net.cache_instance.clear()
        check(net)
        net.cache_instance.close()
        """
    process = start(text).done()
    assert process.err.count("WARNING") == 1
    assert folders() == []


def test_a_module_that_is_dropped_takes_its_folder_along(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def use():
        @torchcache(persistent=True)
        class Net(nn.Module):
            def forward(self, x):
                return x * 2

        net = Net()
        assert torch.equal(net(torch.ones(3, 4)), torch.full((3, 4), 2.0))
        assert len(list(tmp_path.iterdir())) == 1

    use()
    gc.collect()
    assert list(tmp_path.iterdir()) == []
