"""What ranks say to each other, and which one is to blame if they cannot, with real ranks over gloo."""

import pytest

from tests.helpers.gloo import run_ranks

_BEGIN = """
import datetime, signal, threading, time
from torch import distributed
from torchcache2.core.errors import RankError
from torchcache2.engine.collective import channel as channels
from torchcache2.engine.collective.channel import Channel
from torchcache2.engine.collective.exchange import Exchange, Part
from torchcache2.engine.collective.wire import Flag


def begin(seconds=60):
    timeout, where = datetime.timedelta(seconds=seconds), f"file://{STORE}"
    distributed.init_process_group("gloo", init_method=where, rank=RANK, world_size=WORLD, timeout=timeout)
    return Channel(distributed.group.WORLD)


def raised(channel, call):
    try:
        call()
    except RankError as error:
        for _ in range(2):  # it stays as it is
            try:
                channel.gather("a", b"")
            except RankError as again:
                assert (str(again), again.rank) == (str(error), error.rank)
        return error
    raise AssertionError("it went well")


def blamed(channel, call, rank, text):
    error = raised(channel, call)
    assert error.rank == rank and text in str(error), (error.rank, str(error))


def swap(channel):
    return channel.swap(torch.zeros(WORLD, dtype=torch.uint8), [1] * WORLD, [1] * WORLD)


"""

_BYTES = """
def told(rank, turn):
    return bytes([rank]) * ((rank * 7 + turn * turn * 13) % 5000 * (rank != 2))

channel = begin()
with torch.inference_mode(), torch.device("meta"):  # what the caller does with tensors changes nothing
    assert channel.gather("a", b"") == [b""] * WORLD
for turn in range(60):
    found = channel.gather("a" if turn % 3 else "b", told(RANK, turn))
    assert found == [told(rank, turn) for rank in range(WORLD)], turn
for _ in range(140):  # blocks get smaller again
    assert channel.gather("a", b"x") == [b"x"] * WORLD
assert channel._round.capacity == 1024

sizes = torch.arange(WORLD**2).view(WORLD, WORLD) * 1000  # nothing from rank 0 to itself
parts = [torch.full((int(n),), 10 * RANK + to, dtype=torch.uint8) for to, n in enumerate(sizes[RANK])]
data = torch.cat(parts)
sent, received = sizes[RANK].tolist(), sizes[:, RANK].tolist()
with torch.device("meta"):
    found = channel.swap(data, sent, received)
parts = [torch.full((int(n),), 10 * of + RANK, dtype=torch.uint8) for of, n in enumerate(sizes[:, RANK])]
assert torch.equal(found, torch.cat(parts))
nothing = channel.swap(torch.empty(0, dtype=torch.uint8), [0] * WORLD, [0] * WORLD)
assert nothing.shape == (0,) and channel.seconds > 0
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [3, 2, 4])
def test_bytes_of_any_length_come_from_each_rank(count, tmp_path):
    run_ranks(_BEGIN + _BYTES, tmp_path, count=count)


_GROUPS = """
import gc, weakref

begin()
pairs = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
if RANK > 1:  # these ranks are in more groups than the others
    distributed.new_group([2, 3], use_local_synchronization=True)
mine, ranks = pairs[RANK % 2], [RANK % 2, RANK % 2 + 2]
channels = [Channel(group) for group in (distributed.group.WORLD, mine, mine)]
for channel in channels:
    of_group = range(4) if channel is channels[0] else ranks
    said = channel.gather("a", bytes([RANK]))
    assert said == [bytes([rank]) for rank in of_group] and channel.rank == list(of_group).index(RANK)

first, other = Exchange.of(mine), Exchange.of(distributed.group.WORLD)
made = [weakref.ref(first), weakref.ref(other)]
assert Exchange.of(mine) is first and other is not first
first.channel.gather("a", b"")
child = os.fork()
if not child:
    try:
        Exchange.of(mine).step(Part("", None, Flag.BYPASS))
        os._exit(1)
    except RankError as error:
        del first, other, mine, pairs
        gc.collect()
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
distributed.destroy_process_group(mine)
del first, other, mine, pairs, channel, channels
gc.collect()
assert made[0]() is None and made[1]() is not None
if RANK < 2:  # now all ranks have made as many groups: the newest torch would hang without
    distributed.new_group([0, 1], use_local_synchronization=True)
pairs = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
mine = pairs[RANK % 2]
other = Exchange.of(mine).channel
assert other.gather("a", b"anew") == [b"anew"] * 2
if RANK % 2:
    if RANK == 3:
        os._exit(0)
    blamed(other, lambda: other.gather("a", b""), 1, "rank 1 of the group (3 of all) has ended")
"""


def test_each_group_has_its_own(tmp_path):
    run_ranks(_BEGIN + _GROUPS, tmp_path, count=4)


_ENDED = """
channel = begin()
channel.gather("a", b"")
if RANK == 1:
    os._exit(0)
if RANK == 2:
    time.sleep(1)  # it computes
start = time.monotonic()
blamed(channel, lambda: swap(channel) if CALL == "swap" else channel.gather("a", b""), 1, "rank 1 has ended")
assert time.monotonic() - start < 20
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("call", ["swap", "gather"])
def test_a_rank_that_was_killed_is_named(call, tmp_path):
    run_ranks(_BEGIN + f"CALL = {call!r}\n" + _ENDED, tmp_path, count=3)


_STORE_ENDED = """
from pathlib import Path

port = Path(f"{STORE}.port")
if RANK == 0:
    store = distributed.TCPStore("127.0.0.1", 0, WORLD, True, wait_for_workers=False)
    port.with_suffix(".part").write_text(str(store.port))
    port.with_suffix(".part").rename(port)
else:
    while not port.exists():
        time.sleep(0.01)
    store = distributed.TCPStore("127.0.0.1", int(port.read_text()), WORLD, False, wait_for_workers=False)
distributed.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD)
channel = Channel(distributed.group.WORLD)
channel.gather("a", b"")
if RANK == 0:
    os._exit(0)
blamed(channel, lambda: channel.gather("a", b""), 0, "rank 0 has ended")
"""


def test_the_rank_that_held_the_store_is_named(tmp_path):
    run_ranks(_BEGIN + _STORE_ENDED, tmp_path, count=3)


_ABSENT = """
channels._PATIENCE = 4  # for machines that are busy
channel = begin(1)
if CALL != "first":
    channel.gather("a", b"")
if RANK == 1:
    time.sleep(3 if CALL == "first" else 8)
call = (lambda: swap(channel)) if CALL == "swap" else (lambda: channel.gather("a", b""))
start = time.monotonic()
error = raised(channel, call)
assert " has not come to this call within 1 s" in str(error) and error.rank == 1, (error.rank, str(error))
assert time.monotonic() - start < 20
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("call", ["first", "swap"])
def test_a_rank_that_does_not_come_is_named(call, tmp_path):
    run_ranks(_BEGIN + f"CALL = {call!r}\n" + _ABSENT, tmp_path, count=3)


_INTERRUPTED = """
channel = begin()
channel.gather("a", b"")
if RANK == 1:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        channel.gather("a", b"")
        raise AssertionError("it was not interrupted")
    except KeyboardInterrupt:
        pass
elif RANK == 2:
    time.sleep(2)
blamed(channel, lambda: channel.gather("a", b""), 1, "rank 1 cannot continue: KeyboardInterrupt()")

channel = Channel(distributed.group.WORLD)
channel.gather("a", b"")
if RANK == 1:
    channel.close()
else:
    blamed(channel, lambda: channel.gather("a", b""), 1, "rank 1 has closed the exchange")
"""


def test_an_interrupted_rank_lets_the_others_know(tmp_path):
    run_ranks(_BEGIN + _INTERRUPTED, tmp_path, count=3)


_OUT_OF_STEP = """
channel = begin()
channel.gather("a", b"")
channel.gather("b", b"x" * 5000)  # gloo ends a process that gets larger blocks than it expects
blamed(channel, lambda: channel.gather("ab"[RANK], b""), None, "out of step")
"""


def test_other_calls_are_found(tmp_path):
    run_ranks(_BEGIN + _OUT_OF_STEP, tmp_path)
