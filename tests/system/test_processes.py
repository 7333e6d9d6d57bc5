"""Processes that share a directory, fork, and end: rows are on disk or forgotten, and nothing hangs."""

import collections
import json
import os
import signal
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.helpers import warm

SOAK = bool(os.environ.get("SOAK"))
LONG = 3600.0 if SOAK else warm.DEADLINE

# A row tells which item it belongs to, and all sums are exact.
NET = """
import os, sys, time
import torch
from torch import nn
from torchcache2 import torchcache

torch.set_num_threads(1)
PATH, *ARGUMENTS = sys.argv[1:]


def make(**options):
    usual = {"persistent": True, "persistent_cache_dir": PATH, "compression": "none", "probe": False}

    @torchcache(**(usual | options))
    class Net(nn.Module):
        def __init__(self, scale=1.0):
            super().__init__()
            self.scale = scale

        def forward(self, x):
            sys.audit("computed", x)
            return torch.cat([x, x.sum(1, keepdim=True)], 1) * self.scale

    return Net


def items(numbers):
    return torch.tensor(list(numbers), dtype=torch.float32)[:, None] + torch.arange(16) / 32


def rows(numbers, scale=1.0):
    x = items(numbers)
    return torch.cat([x, x.sum(1, keepdim=True)], 1) * scale


def check(net, numbers):
    assert torch.equal(net(items(numbers)), rows(numbers, net.scale)), "a wrong row"


def stats(net):
    return net.cache_instance.stats()

"""


def row(number, scale):
    x = torch.tensor([number], dtype=torch.float32) + torch.arange(16) / 32
    return torch.cat([x, x.sum(0, keepdim=True)]) * scale


def sealed(path):
    """The items whose rows are in the directory, by scale; each row is checked."""
    found = collections.defaultdict(list)
    for file in sorted(Path(path).glob("*/*.safetensors")):
        scale = float(json.loads((file.parent / "fingerprint.json").read_text())["values"]["attribute scale"])
        tensors = safetensors.torch.load_file(file)
        assert len(tensors["keys"]) == len(tensors["output"])
        for output in tensors["output"]:
            number = round(float(output[0]) / scale)
            assert torch.equal(output, row(number, scale))
            found[scale].append(number)
    return {scale: sorted(numbers) for scale, numbers in found.items()}


def leftovers(path):
    return sorted(
        file.name
        for file in Path(path).rglob("*")
        if file.is_file()
        and file.name not in ("CACHEDIR.TAG", ".lock", "fingerprint.json")
        and file.suffix != ".safetensors"
    )


# Another run, which writes nothing: which of the first so many items it finds, each checked.
AGAIN = """
def hook(event, arguments):
    if event == "computed":
        missing.extend(arguments[0][:, 0].tolist())


net = make()(float(ARGUMENTS[0]))
count = int(ARGUMENTS[1])
check(net, [-1])  # from now on its forward gets only what is not found
missing = []
sys.addaudithook(hook)
check(net, range(count))
last = stats(net)
assert (last.corrupt, last.faults) == (0, 0), last
print(*sorted(set(range(count)) - set(missing)), flush=True)
os._exit(0)
"""


def found_by_another(path, count, scale=1.0):
    """The items below `count` that another process finds."""
    return list(map(int, warm.run(NET + AGAIN, path, scale, count).words))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows"


# The end of a process

ENDINGS = {
    "the end of the script": (0, ""),
    "sys.exit": (3, "sys.exit(3)"),
    "sys.exit in the middle of a forward": (
        5,
        """
        sys.addaudithook(lambda event, _: event == "computed" and sys.exit(5))
        net(items([100]))
        """,
    ),
    "an exception": (1, "1 / 0"),
    "a signal that becomes sys.exit": (
        7,
        """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        """,
    ),
    "a thread that goes on for a while": (
        0,
        """
        import threading
        def later():
            time.sleep(0.1)
            check(net, [8, 9])
        threading.Thread(target=later).start()
        """,
    ),
    "a daemon thread that waits": (
        0,
        """
        import threading
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        """,
    ),
    "a reference cycle with the module": (0, "net.itself = [net]"),
    "a module that is deleted": (0, "del net, Net"),
    "a module that is kept by the interpreter": (0, "sys.net = net"),
    "a flush that is done already": (0, "net.cache_instance.flush()"),
    "a cache that is closed already": (0, "net.cache_instance.close()"),
    "a cache that is closed while another one goes on": (
        0,
        """
        other = Net(1.0)
        net.cache_instance.close()
        check(other, [8, 9])
        """,
    ),
}


# What is taken down with the interpreter may matter here.
WHOLE = {
    "the end of the script",
    "an exception",
    "a daemon thread that waits",
    "a reference cycle with the module",
    "a module that is deleted",
    "a module that is kept by the interpreter",
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_waits_is_on_disk_when_a_process_ends(path, ending):
    code, last = ENDINGS[ending]
    script = NET + "Net = make()\nnet = Net()\ncheck(net, range(8))\n" + warm.dedented(last)
    process = warm.start(script, path, whole=ending in WHOLE).done(code)
    assert leftovers(path) == []
    assert "WARNING" not in process.err and "Exception ignored" not in process.err
    assert sealed(path) == {1.0: list(range(10 if "[8, 9]" in last else 8))}


@pytest.mark.slow
def test_every_codec_works_at_exit(path):
    script = """
    codecs = {1.0: "none", 2.0: "brotli", 4.0: "blosc2"}
    nets = [make(compression=codec)(scale) for scale, codec in codecs.items()]
    for net in nets:
        check(net, range(600))
    """
    warm.start(NET + warm.dedented(script), path, whole=True).done()
    assert [len(found_by_another(path, 600, scale)) for scale in (1.0, 2.0, 4.0)] == [600] * 3


@pytest.mark.parametrize("last", ["os._exit(4)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_what_waits_is_forgotten_when_a_process_is_cut_off(path, last):
    script = f"""
    net = make()()
    check(net, range(8))
    net.cache_instance.flush()
    check(net, range(20))
    {last}
    """
    code = {"os._exit(4)": 4, "os.abort()": -signal.SIGABRT}.get(last, -signal.SIGKILL)
    warm.start(NET + warm.dedented(script), path).done(code)
    assert found_by_another(path, 20) == list(range(8))
    assert leftovers(path) == []


AT_EXIT = """
import atexit

net = make()()


def late(numbers):
    check(net, numbers)
    print("late", net.cache_instance.stats().hits)


atexit.register(late, range(8))  # called after the cache's own
check(net, range(8))
atexit.register(late, range(4, 12))  # called before
"""


@pytest.mark.slow
def test_handlers_that_run_at_exit_may_still_call_the_module(path):
    process = warm.start(NET + AT_EXIT, path, whole=True).done()
    assert process.words == ["late", "4", "late", "12"]
    assert process.err == ""
    assert found_by_another(path, 12) == list(range(12))


DAEMON = """
import itertools, threading

net = make(max_persistent_cache_size="80MB")()
threads = int(ARGUMENTS[0])
calling = threading.Barrier(threads + 1)


def forever():
    for i in itertools.count():
        check(net, range(i * 100, i * 100 + 100))
        if i == 3:
            calling.wait()  # all calls for these rows have returned, of every thread


for _ in range(threads):
    threading.Thread(target=forever, daemon=True).start()
check(net, range(400))
calling.wait()
{last}
"""


@pytest.mark.parametrize("last", ["", "sys.exit(3)", "1 / 0"])
def test_daemon_threads_that_go_on_do_not_delay_the_end(path, last):
    process = warm.start(NET + DAEMON.replace("{last}", last), path, 2)
    process.done({"": 0, "sys.exit(3)": 3, "1 / 0": 1}[last])
    assert leftovers(path) == []
    assert found_by_another(path, 400) == list(range(400))


# Interrupts

CALLING = """
import itertools

net = make(compression="brotli", compression_quality=9)()
check(net, range(8))
net.cache_instance.flush()
print("ready")
for i in itertools.count(1):
    check(net, range(i * 1000, i * 1000 + 1000))
    if ARGUMENTS[0] == "flush":
        net.cache_instance.flush()
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("what", ["forward", "flush"])
@pytest.mark.parametrize("times", [1, 1000])
def test_ctrl_c_ends_a_run_and_the_next_one_goes_on(path, what, times):
    process = warm.start(NET + CALLING, path, what, whole=True).until("ready")
    end = time.monotonic() + warm.DEADLINE
    for _ in range(times):
        process.send(signal.SIGINT)
        if process.poll(0.02) is not None or time.monotonic() > end:
            break
    assert process.wait() in (-signal.SIGINT, 128 + signal.SIGINT, 1), process.err
    assert "KeyboardInterrupt" in process.err
    assert found_by_another(path, 8) == list(range(8))
    assert leftovers(path) == []


INTERRUPTED = """
import random, signal

random.seed(5)
signal.signal(signal.SIGALRM, signal.default_int_handler)
net = make(max_memory_cache_size=0)()
rounds, interrupts = int(ARGUMENTS[0]), 0
for i in range(rounds):
    first = random.randrange(500)
    act = random.choice(["call", "call", "flush", "stats", "clear"] if i % 10 == 0 else ["call", "flush"])
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-3))
        if act == "call":
            check(net, range(first, first + 20))
        else:
            getattr(net.cache_instance, act)()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupts += 1
    # What was interrupted has left no wrong row behind, and no lock.
    check(net, range(first - 5, first + 25))
net.cache_instance.flush()
check(net, range(600))
last = stats(net)
assert (last.corrupt, last.faults) == (0, 0), last
assert interrupts > rounds / 10
print(interrupts)
"""


@pytest.mark.slow
def test_a_session_goes_on_after_any_number_of_interrupts(path):
    warm.start(NET + INTERRUPTED, path, 20_000 if SOAK else 150).done(timeout=LONG)
    assert found_by_another(path, 600) == list(range(600))
    assert leftovers(path) == []


# CPython runs signal handlers when a Python function starts, and when a C function has returned: at each of
# those points in turn, one call of the tier is interrupted.
INTERRUPTED_EVERYWHERE = """
import shutil, sys, tempfile, threading
import torch
from tests.helpers.storage import NEVER, Unsynced, found, put
from torchcache2.tiers.disk.tier import DiskTier

ACTS = {
    "put": lambda tier: put(tier, range(5, 10)),
    "get": lambda tier: found(tier, range(5)),
    "get what another one has sealed": lambda tier: found(tier, range(20, 25)),
    "flush": lambda tier: tier.flush(),
    "drop": lambda tier: tier.drop(b"first namespace."),
    "stats": lambda tier: tier.stats(),
    "close": lambda tier: tier.close(),
}


def faults(tier):
    return tier.stats().corrupt, tier.stats().faults


def attempt(act, n, folder):
    left, where = n, None

    def profile(frame, event, argument):
        nonlocal left, where
        name = frame.f_code.co_filename
        if event in ("call", "c_return") and ("/torchcache2/" in name or name.endswith("/threading.py")):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                where = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise KeyboardInterrupt

    shutil.copytree(of_others, folder)
    tier = DiskTier(folder, fs=Unsynced(), codec="none", delay=NEVER)
    put(tier, range(5))
    if act == "get":
        tier.flush()
    call = ACTS[act]
    try:
        sys.setprofile(profile)
        call(tier)
        sys.setprofile(None)
    except KeyboardInterrupt:
        pass
    is_through = threading.Event()

    def other():
        put(tier, range(10, 15))
        found(tier, range(25))
        tier.flush()
        found(tier, range(25))
        is_through.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert is_through.wait(30), f"another thread hangs after an interrupt at {where}"
    # An interrupt of `close` may come before or after it takes effect.
    assert act == "close" or found(tier, range(10, 15)) == list(range(10, 15)), where
    assert faults(tier) == (0, 0), (where, tier.stats())
    put(tier, range(25))  # what was forgotten, but nothing that only seems to be kept
    tier.close()
    again = DiskTier(folder, fs=Unsynced(), delay=NEVER)
    here = found(again, range(25))
    assert act == "close" or here == list(range(25)), (where, here)
    assert faults(again) == (0, 0), where
    again.close()
    return where


act, step = sys.argv[1], int(sys.argv[2])
of_others = tempfile.mkdtemp() + "/rows"
others = DiskTier(of_others, fs=Unsynced(), codec="none", delay=NEVER)
put(others, range(20, 25))
others.close()
n = points = 0
while n == 0 or where:
    n += step
    folder = tempfile.mkdtemp()
    where = attempt(act, n, folder + "/rows")
    shutil.rmtree(folder)
    points += where is not None
print(points)
"""
ACTS = ["put", "get", "get what another one has sealed", "flush", "drop", "stats", "close"]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("act", ACTS)
def test_an_interrupt_at_any_point_leaves_neither_a_lock_nor_a_wrong_row(act, tmp_path):
    step = 1 if SOAK else 13
    process = warm.run(INTERRUPTED_EVERYWHERE, act, step, env={"TMPDIR": str(tmp_path)})
    assert int(process.out) * step >= 28


# Forks

FORKED = """
net = make()()
check(net, range(8))
codes = []
for child in range(3):
    pid = os.fork()
    if pid == 0:
        check(net, range(8))
        check(net, range(100 * child + 100, 100 * child + 120))
        {end}
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    check(net, range(8))
check(net, range(8, 12))
print(*codes)
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(0)", 0), ("1 / 0", 1), ("os._exit(4)", 4), ("os.kill(os.getpid(), 9)", -9)]
)
def test_a_child_writes_its_own_rows_and_its_parent_the_others(path, end, code):
    script = FORKED.replace("{end}", end)
    process = warm.start(NET + script, path, whole=True).done()
    assert process.words[-3:] == [str(code)] * 3
    own = [*range(100, 120), *range(200, 220), *range(300, 320)] if code in (0, 1) else []
    # What waited in the parent is there once.
    assert sealed(path) == {1.0: [*range(12), *own]}
    assert leftovers(path) == []


MULTIPROCESSING = """
import concurrent.futures, multiprocessing

net = make()()


def work(numbers):
    check(net, range(8))
    check(net, numbers)
    return os.getpid()


check(net, range(8))
fork = multiprocessing.get_context("fork")
processes = [fork.Process(target=work, args=(range(i, i + 10),)) for i in (100, 200)]
for process in processes:
    process.start()
for process in processes:
    process.join(30)
assert [process.exitcode for process in processes] == [0, 0]
other = make()()
check(other, [*range(100, 110), *range(200, 210)])
assert stats(other).hits == 20  # before the parent ends

with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as pool:
    assert os.getpid() not in list(pool.map(work, [range(i, i + 10) for i in range(300, 400, 10)]))
failed = fork.Process(target=lambda: (work(range(500, 510)), 1 / 0))
failed.start()
failed.join(30)
assert failed.exitcode == 1
"""


def test_processes_of_multiprocessing_write_what_they_have_computed(path):
    warm.start(NET + MULTIPROCESSING, path).done()
    numbers = [*range(8), *range(100, 110), *range(200, 210), *range(300, 400), *range(500, 510)]
    assert sealed(path) == {1.0: numbers}
    assert leftovers(path) == []


SPAWNED = """
import multiprocessing
from torch.utils.data import DataLoader, Dataset


@torchcache(persistent=True, persistent_cache_dir=PATH, compression="none")
class Net(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        sys.audit("computed", x)
        return torch.cat([x, x.sum(1, keepdim=True)], 1) * self.scale


class Features(Dataset):
    def __init__(self, net, count):
        self.net, self.count = net, count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return self.net(items([number]))[0]


if __name__ == "__main__":
    method, workers, lasts = ARGUMENTS[0], int(ARGUMENTS[1]), ARGUMENTS[2] == "True"
    net = Net()
    check(net, range(8))
    loader = DataLoader(
        Features(net, 64),
        batch_size=8,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=lasts,
        timeout=50,
    )
    assert torch.equal(torch.cat(list(loader)), rows(range(64)))
    if lasts:  # the end comes in the middle of an epoch
        next(iter(loader))
    print("end")
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_rows_of_dataloader_workers_reach_the_disk(path, method, workers):
    process = warm.start(NET + SPAWNED, path, method, workers, False).done()
    assert process.words == ["end"]
    numbers = sealed(path)[1.0]
    assert sorted(set(numbers)) == list(range(64))
    if method == "fork":  # what the parent has in memory they have, too
        assert len(numbers) == len(set(numbers))
    assert leftovers(path) == []


def test_the_end_of_a_process_may_come_while_its_workers_live(path):
    # Python ends them with SIGTERM: what waits in them is forgotten.
    process = warm.start(NET + SPAWNED, path, "fork", 2, True, whole=True).done()
    assert process.words == ["end"]
    assert set(found_by_another(path, 64)) >= set(range(8))


BUSY = """
import faulthandler, multiprocessing, threading

options = {"max_memory_cache_size": int(ARGUMENTS[1]), "max_persistent_cache_size": "4MB"}
net = make(**options, persistent=ARGUMENTS[2] == "disk")()


def work():
    faulthandler.dump_traceback_later(30)  # where it hangs
    check(net, range(8))
    check(net, range(5000, 5100))
    net.cache_instance.flush()
    check(net, range(5000, 5100))


def loop(first):
    i = 0
    while not stop.is_set():
        check(net, range(first + i % 40 * 10, first + i % 40 * 10 + 15))
        if i % 10 == 0:
            net.cache_instance.flush()
        i += 1


# Torch prepares itself at first calls: a child of a fork in the middle of that would wait forever.
check(net, range(8000, 8015))
net.cache_instance.flush()
check(net, range(8000, 8015))
stop = threading.Event()
threads = [threading.Thread(target=loop, args=(first,)) for first in (1000, 2000)]
for thread in threads:
    thread.start()
fork = multiprocessing.get_context("fork")
codes = []
for _ in range(int(ARGUMENTS[0])):
    child = fork.Process(target=work)
    child.start()
    child.join(40)
    codes.append(child.exitcode)
    if child.exitcode is None:
        child.kill()
        break
stop.set()
for thread in threads:
    thread.join()
assert codes == [0] * int(ARGUMENTS[0]), codes
"""


@pytest.mark.parametrize(
    ("memory", "where"), [(0, "disk"), (1_000_000_000, "memory")], ids=["disk", "memory"]
)
def test_children_of_a_busy_process_neither_hang_nor_err(path, memory, where):
    rounds = 500 if SOAK else 8
    warm.start(NET + BUSY, path, rounds, memory, where).done(timeout=LONG)
    if where == "disk":
        assert leftovers(path) == []
        assert set(found_by_another(path, 8)) == set(range(8))


FORKED_WHILE_WRITING = """
import os, sys, threading, time
from tests.helpers.storage import NEVER, found, put
from torchcache2.files.filesystem import FileSystem
from torchcache2.tiers.disk import index as located
from torchcache2.tiers.disk.tier import DiskTier

located._LOOK_EVERY = 0.0
parent = os.getpid()
reached, goes_on = threading.Event(), threading.Event()


class Slow(FileSystem):
    def rename(self, old, new):
        if os.getpid() != parent:
            time.sleep(60)  # what the child puts is lost with it
        reached.set()
        assert goes_on.wait(20)
        super().rename(old, new)


tier = DiskTier(sys.argv[1], fs=Slow(), codec="none", delay=0.0)
put(tier, range(5))
assert reached.wait(20)
(to_child, tell_child), (to_parent, tell_parent) = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    goes_on.set()
    assert found(tier, range(5)) == []  # they are the parent's
    os.write(tell_parent, b"1")
    os.read(to_child, 1)
    assert found(tier, range(5)) == list(range(5))
    put(tier, range(3, 8))
    os._exit(0 if found(tier, range(8)) == list(range(8)) else 1)
os.read(to_parent, 1)
goes_on.set()
tier.flush()
os.write(tell_child, b"1")
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
tier.close()
"""


def test_a_child_finds_what_its_parent_was_writing(path):
    warm.run(FORKED_WHILE_WRITING, path)
    assert len(list(path.glob("*/*.safetensors"))) == 1
