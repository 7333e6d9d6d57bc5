"""Ranks that are killed in each round, and end early; test_collective.py runs this.

Ranks 0 and 1 survive all others, with each of which they are in a group.
"""

import datetime
import json
import os
import signal
import sys
import threading
import time

from tests.helpers.steps import ITEMS, Backbone, dist, raises
from torchcache2 import RankError, torchcache
from torchcache2.engine.collective.channel import Channel

PLACES = os.environ["PLACES"].split()
SOON = 4.0
where = ""
turn = 0


def die(place):
    if place == where and (place != "ask" or turn > 0):  # before the first step nobody knows of it
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


def patched(method):
    def called(self, first, *args):
        die(first if isinstance(first, str) else "swap")
        return method(self, first, *args)

    return called


def calls(rank, group):
    """Steps in which all rounds occur; who survives is told who was killed."""
    global turn
    net = torchcache(distributed="collective", probe=False, process_group=group)(Backbone())
    if where == "join":
        with net.cache_instance.join():
            for step in range(1 if rank == 2 else 4):
                net(ITEMS[8 * step :][:8])
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    for turn in range(3):
        if where == "exit" and rank == 2 and turn == 1:
            return
        net(ITEMS[(rank + turn) % 3 :: 3])


store = sys.argv[1]
me, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
timeout = datetime.timedelta(seconds=30)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=me, world_size=world, timeout=timeout)
groups = [dist.new_group([0, 1, 2 + number], timeout=timeout) for number in range(len(PLACES))]
sys.addaudithook(lambda event, args: die("compute") if event == "tests.computed" and me > 1 else None)
Channel.gather, Channel.swap = patched(Channel.gather), patched(Channel.swap)
for number, group in enumerate(groups):
    os.environ["TORCHCACHE_JOB"] = f"{store} {number} {me}"
    if me == 2 + number:
        time.sleep(0.3)  # the others wait for it
        where = PLACES[number]
        calls(2, group)
    elif me < 2:
        where, place = "join" if PLACES[number] == "join" else "", PLACES[number]
        began, text = time.monotonic(), ""
        try:
            with raises(RankError, "rank 2", within=SOON) as caught:
                calls(me, group)
            assert caught[0].rank == 2
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        print(json.dumps([place, text, time.monotonic() - began]), flush=True)
