"""`ahead` has rows in memory when the forward asks for them, and changes nothing else."""

import contextlib
import copy
import functools
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref

import pytest
import torch
from torch import nn
from torch.utils import data

from tests.helpers.late import Sends
from tests.helpers.outputs import frozen, warnings_in
from tests.helpers.redis import RedisServer
from torchcache2 import OptionError, torchcache
from torchcache2.engine import ahead
from torchcache2.tiers.disk.tier import DiskTier

X, LABELS = torch.arange(320.0).view(40, 8), torch.arange(40)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x, scale=None):
        return self.layer(x) if scale is None else self.layer(x) * scale


@pytest.fixture
def net(path):
    """A module with all rows of X on disk, and no memory for any."""
    return warm(path)


def warm(path, **options):
    torch.manual_seed(1)
    options = {"persistent_cache_dir": path, "max_memory_cache_size": 0, "compression": "none"} | options
    cached = frozen(torchcache(Net(), **options))
    cached.cache_instance.warmup(X)
    cached.cache_instance.flush()
    return cached


@pytest.fixture
def reads(monkeypatch):
    """The names of the threads that have read rows from a disk."""
    found = []
    monkeypatch.setattr(DiskTier, "get", noting(found, DiskTier.get))
    return found


def noting(found, method):
    """A method that notes in which thread it is called."""

    def call(*args):
        found.append(threading.current_thread().name)
        return method(*args)

    return call


def loader(size=4, **options):
    return data.DataLoader(data.TensorDataset(X, LABELS), size, **options)


def expected(net, x):
    return x @ net.layer.weight.T + net.layer.bias


def threads():
    return [one for one in threading.enumerate() if one.name == "torchcache2 ahead"]


def ended(seconds=5.0):
    """Whether all threads have ended, and what they had is gone."""
    gc.collect()
    end = time.monotonic() + seconds
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    return not threads()


def is_idle(net):
    cache = net.cache_instance
    return ended() and cache._loops == [] and cache.engine.tiers.rooms == []


def epoch(net, batches, read=lambda net, x: net(x)):
    """The labels of a loop, all of whose outputs were right."""
    labels = []
    for x, y in batches:
        torch.testing.assert_close(read(net, x), expected(net, x))
        labels += y.tolist()
    return labels


def test_rows_are_read_in_a_thread_and_batches_come_in_order(net, reads):
    ahead = net.cache_instance.ahead(loader())
    for _ in range(2):
        assert epoch(net, ahead) == LABELS.tolist()
    # The first call of a loop says how the next ones will be made.
    assert sorted(reads) == ["MainThread"] * 2 + ["torchcache2 ahead"] * 18
    assert net.cache_instance.stats().hits == 2 * 40 and net.cache_instance.stats().misses == 40
    assert is_idle(net)
    assert len(ahead) == 10 and ahead.batch_size == 4 and len(copy.copy(ahead)) == 10
    with pytest.raises(TypeError):
        len(net.cache_instance.ahead(batch for batch in loader()))


def autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return net(x)


def as_inference(net, x):
    with torch.inference_mode():
        return net(x).clone()


def in_parts(net, x):
    return torch.cat([net(part) for part in x.chunk(3)])


def in_another_thread(net, x):
    found = []
    thread = threading.Thread(target=lambda: found.append(net(x)), name="another")
    thread.start()
    thread.join()
    return found[0]


def in_a_larger_batch(net, x):
    return net(torch.cat([X[:2] + 0.5, x]))[2:]


def into_the_output(net, x):
    output = net(x)
    before = output.clone()
    output.zero_()  # nobody else may have this memory
    return before


@pytest.mark.parametrize(
    "read", [as_inference, in_parts, in_another_thread, in_a_larger_batch, into_the_output, torch.compile]
)
def test_rows_are_found_however_the_batch_is_asked_for(net, reads, read):
    if read is torch.compile:
        compiled = torch.compile(net, backend="eager")
        read = lambda net, x: compiled(x)  # noqa: E731
    assert epoch(net, net.cache_instance.ahead(loader()), read) == LABELS.tolist()
    reads = reads[reads.index("torchcache2 ahead") :]
    assert reads.count("torchcache2 ahead") == 9 and reads.count("MainThread") <= 2 + 9 * (
        read is in_a_larger_batch
    )


@pytest.fixture(params=["bucket", "server"])
def url(request, tmp_path):
    """That of a bucket, or of a server: both may be far away."""
    if request.param == "bucket":
        yield f"file://{tmp_path}/bucket"
    else:
        with RedisServer() as server:
            yield server.url


def test_rows_from_far_away_are_read_in_the_thread(url, monkeypatch):
    warm(url).cache_instance.close()
    torch.manual_seed(1)
    net = frozen(torchcache(Net(), persistent_cache_dir=url, max_memory_cache_size=0))
    found = []
    monkeypatch.setattr(ahead.Room, "put", noting(found, ahead.Room.put))
    assert epoch(net, net.cache_instance.ahead(loader())) == LABELS.tolist()
    assert found == ["torchcache2 ahead"] * 9
    stats = net.cache_instance.stats()
    assert (stats.hits, stats.misses, stats.faults) == (40, 0, 0)


@pytest.mark.parametrize("read", [lambda net, x: net(x), in_parts, in_a_larger_batch])
def test_rows_for_an_accelerator_wait_until_the_call_that_uses_them(net, monkeypatch, read):
    runtime = Sends()
    monkeypatch.setattr(ahead, "Room", functools.partial(ahead.Room, runtime))
    assert epoch(net, net.cache_instance.ahead(loader()), read) == LABELS.tolist()
    assert runtime.log.count("event of aside") == 9
    assert runtime.log.count("wait of default") >= 9


def test_keys_are_made_under_the_modes_of_the_call(net, reads):
    for x, _ in loader():
        autocast(net, x)
    net.cache_instance.flush()
    del reads[:]
    for x, _ in net.cache_instance.ahead(loader(), batches=3):
        assert autocast(net, x).dtype is torch.bfloat16
    assert sorted(reads) == ["MainThread", *["torchcache2 ahead"] * 9]


def test_inputs_say_what_the_forward_gets(net, log):
    batches = [{"image": x, "label": y} for x, y in loader()]
    ahead = net.cache_instance.ahead(batches, inputs=lambda batch: batch["image"])
    assert [batch["label"].tolist() for batch in ahead] == [batch["label"].tolist() for batch in batches]
    seen = list(batches)
    for batch in net.cache_instance.ahead(iter(batches), inputs=lambda batch: {"x": batch["image"]}):
        assert batch is seen.pop(0)
        net(x=batch["image"])
    assert seen == [] and warnings_in(log) == []


@pytest.mark.parametrize("inputs", [lambda batch: batch[0] + 1, lambda batch: (batch[0], object())])
def test_wrong_inputs_end_with_a_warning(net, reads, log, inputs):
    net.cache_instance.warmup(X + 1)
    del reads[:]
    for _ in range(2):
        assert epoch(net, net.cache_instance.ahead(loader(2), inputs=inputs)) == LABELS.tolist()
    assert reads.count("MainThread") == 40 and reads.count("torchcache2 ahead") <= 20
    (warning,) = warnings_in(log)
    assert "nothing is read ahead any more" in warning and "inputs=" in warning


@pytest.mark.parametrize(
    ("given", "options"), [(5, {}), (loader(), {"batches": 0}), (loader(), {"batches": True})]
)
def test_mistakes_are_errors_at_once(net, given, options):
    with pytest.raises(OptionError):
        net.cache_instance.ahead(given, **options)
    with pytest.raises(OptionError, match="pass inputs"):
        next(iter(net.cache_instance.ahead([object()])))


def test_exceptions_of_the_loader_come_after_the_batches_before_them(net):
    def failing():
        yield from itertools.islice(loader(), 3)
        raise ValueError("the loader")

    labels = []
    with pytest.raises(ValueError, match="the loader"):
        for x, y in net.cache_instance.ahead(failing()):
            net(x)
            labels += y.tolist()
    assert labels == LABELS[:12].tolist() and is_idle(net)


@pytest.mark.parametrize("way", ["break", "close", "exception", "garbage", "never begun"])
def test_leaving_the_loop_ends_the_thread(net, way):
    batches = iter(net.cache_instance.ahead(loader()))
    with contextlib.suppress(KeyError):
        for x, _ in () if way == "never begun" else batches:
            net(x)
            assert threads()
            if way == "exception":
                raise KeyError
            break
    if way == "close":
        batches.close()
    elif way == "garbage":
        cycle = [batches]
        cycle.append(cycle)
        del cycle
    del batches
    sys.last_traceback = None
    traceback.clear_frames(sys.exc_info()[2])
    assert is_idle(net)


def test_weights_that_change_make_what_was_read_useless_and_never_wrong(net, reads):
    for i, (x, _) in enumerate(net.cache_instance.ahead(loader())):
        torch.testing.assert_close(net(x), expected(net, x))
        if i in (2, 5):
            with torch.no_grad():
                net.layer.weight.add_(1.0)
    stats = net.cache_instance.stats()
    assert stats.misses == 40 + 28 and reads.count("torchcache2 ahead") == 9


def test_one_change_does_not_end_reading_ahead(net, reads, log):
    for i, (x, _) in enumerate(net.cache_instance.ahead(loader(2), batches=6)):
        net(x)
        if i == 3:
            with torch.no_grad():
                net.layer.bias.add_(1.0)
    assert reads.count("torchcache2 ahead") == 19 and warnings_in(log) == []


def test_what_is_forgotten_is_not_found_in_the_room(net):
    batches = iter(net.cache_instance.ahead(loader()))
    net(next(batches)[0])
    time.sleep(0.2)  # the rows of the next ones are there
    net.cache_instance.clear()
    before = net.cache_instance.stats().misses
    for x, _ in itertools.islice(batches, 2):
        net(x)
    assert net.cache_instance.stats().misses == before + 8


def test_calls_that_are_not_cached_are_passed_through(net, monkeypatch):
    def labels():
        return epoch(net, net.cache_instance.ahead(loader()))

    net.requires_grad_(True)  # a bypass
    assert labels() == LABELS.tolist() and not threads()
    net.requires_grad_(False)
    monkeypatch.setenv("TORCHCACHE_DISABLE", "1")
    assert labels() == LABELS.tolist() and not threads()
    monkeypatch.delenv("TORCHCACHE_DISABLE")
    for i, (x, _) in enumerate(net.cache_instance.ahead(loader())):
        if i == 4:
            net.cache_instance.close()
        torch.testing.assert_close(net(x), expected(net, x))
    assert labels() == LABELS.tolist() and is_idle(net)


@pytest.mark.parametrize("distributed", ["off", "node"])
def test_what_memory_has_is_not_read(path, reads, distributed):
    net = warm(path, max_memory_cache_size="100MB", distributed=distributed)
    del reads[:]
    assert epoch(net, net.cache_instance.ahead(loader())) == LABELS.tolist()
    assert reads == []
    again = warm(path, max_memory_cache_size=0, distributed=distributed)
    del reads[:]
    assert epoch(again, again.cache_instance.ahead(loader())) == LABELS.tolist()
    assert sorted(reads) == ["MainThread", *["torchcache2 ahead"] * 9]


def test_rows_that_are_computed_meanwhile_are_put_together_with_those_that_were_read(path, reads):
    net = warm(path)
    mixed = torch.cat([X, X + 0.25])[torch.randperm(80)]
    for x in net.cache_instance.ahead(mixed.split(8)):
        torch.testing.assert_close(net(x), expected(net, x))
    stats = net.cache_instance.stats()
    assert (stats.hits, stats.misses) == (40, 80) and is_idle(net)


def test_loops_at_once_and_in_threads(net, reads):
    cache = net.cache_instance
    for (x, _), (other, _) in zip(cache.ahead(loader()), cache.ahead(loader(5)), strict=False):
        torch.testing.assert_close(net(x), expected(net, x))
        torch.testing.assert_close(net(other), expected(net, other))
    found = []

    def run(size):
        found.append(epoch(net, cache.ahead(loader(size))))

    running = [threading.Thread(target=run, args=(size,)) for size in (2, 3, 4, 5)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert found == [LABELS.tolist()] * 4 and is_idle(net)
    assert cache.stats().misses == 40


def test_two_modules_in_one_loop(net, path, reads):
    other = warm(path, subsample_count=4)
    del reads[:]
    inner = other.cache_instance.ahead(loader(), batches=1, inputs=lambda batch: (batch[0] + 1,))
    for cached in (net, other):
        cached.cache_instance.warmup(X + 1)
        cached.cache_instance.flush()
    del reads[:]
    for x, _ in net.cache_instance.ahead(inner):
        torch.testing.assert_close(net(x), expected(net, x))
        torch.testing.assert_close(other(x + 1), expected(other, x + 1))
    assert reads.count("torchcache2 ahead") == 18 and reads.count("MainThread") == 2
    assert is_idle(net) and is_idle(other)


def test_nothing_of_a_loop_waits_for_the_garbage_collector(net):
    class Batches(list):
        pass

    batches = Batches(loader())
    known = weakref.ref(batches)
    gc.collect()
    gc.disable()
    try:
        epoch(net, net.cache_instance.ahead(batches))
        with contextlib.suppress(ZeroDivisionError):
            for x, _ in net.cache_instance.ahead(
                batches if i < 3 else 1 / 0 for i, batches in enumerate(batches)
            ):
                net(x)
        del batches
        assert known() is None
    finally:
        gc.enable()


def test_a_fork_goes_on_without_the_thread(net):
    batches = iter(net.cache_instance.ahead(loader()))
    x, _ = next(batches)
    net(x)
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            is_right = [torch.allclose(net(x), expected(net, x)) for x, _ in batches]
            code = 0 if is_right == [True] * 9 else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len([net(x) for x, _ in batches]) == 9 and is_idle(net)


def test_workers_that_are_forked_at_each_epoch(net, reads):
    ahead = net.cache_instance.ahead(loader(num_workers=2))
    for _ in range(2):
        assert epoch(net, ahead) == LABELS.tolist()
    assert reads.count("torchcache2 ahead") == 18


SCRIPT = """
import sys, torch
from torchcache2 import torchcache
folder = sys.argv[1]
net = torchcache(torch.nn.Linear(8, 3), persistent_cache_dir=folder, max_memory_cache_size=0)
net.requires_grad_(False)
x = torch.rand(64, 8)
net(x); net.cache_instance.flush()
batches = iter(net.cache_instance.ahead(x.split(8)))
for _ in range(3):
    net(next(batches))
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_process_ends_although_a_loop_was_not_left(path):
    start = time.monotonic()
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, b"done\n"), run.stderr
    assert time.monotonic() - start < 60
