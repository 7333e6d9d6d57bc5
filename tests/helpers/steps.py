"""Cases for ranks that call in step: functions that all ranks of one set of processes run, one after another.

A script marks them with `case`, and ends with `run_cases`. Each case has a process group of its own, so
that one that fails does not disturb the next. `stepruns` runs such scripts, and says what has failed where.
"""

import collections
import contextlib
import datetime
import json
import logging
import os
import sys
import time
import traceback

import torch
from torch import nn

from tests.helpers.outputs import assert_same
from torchcache2 import torchcache

dist = torch.distributed

ITEMS = torch.arange(192.0)[:, None] * torch.tensor([1.0, -0.5, 0.25])
SOAK = bool(os.environ.get("SOAK"))
_CASES = []
_heard = []  # what is called with the items that a forward gets


class Backbone(nn.Module):
    """Tells of the items that it computes; its outputs are the same to the last bit in each batch."""

    def __init__(self, scale=2.0):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), scale))
        self.requires_grad_(False).eval()

    def forward(self, x):
        output = x * self.scale + 1
        sys.audit("tests.computed", x, output)
        return output


def expected(x, scale=2.0):
    return x * scale + 1


def case(ranks=4, seconds=6.0, more=0):
    """Mark a case for so many ranks, or all if there are fewer.

    Its process group waits so many seconds for a rank, and there may be more such groups.
    """

    def marked(function):
        _CASES.append((function, min(ranks, int(os.environ["WORLD_SIZE"])), seconds, 1 + more))
        return function

    return marked


class Ranks:
    """What a rank knows in a case.

    Attributes
    ----------
    rank, count : int
    group : ProcessGroup
    computed : list of Tensor
        The batches that forwards have got in this rank.
    on_compute : callable
        Called with each of them, and with the output, in the forward.
    warnings : list of str
        What torchcache2 has said.
    """

    def __init__(self, name, count, groups):
        self.rank, self.count = dist.get_rank(), count
        self.computed, self.warnings = [], []
        self.on_compute = lambda x, output: None
        self._name, self._groups, self._caches = name, groups, []
        self.again()

    def again(self):
        """From now on, caches have a process group that was not used before, and another memory."""
        self.group = self._groups.pop()
        self.nodes(1)

    def nodes(self, count):
        """From now on, caches are made as if the ranks were on so many nodes."""
        node = self.rank * count // self.count
        os.environ["TORCHCACHE_JOB"] = (
            f"{os.environ['TESTS_JOB']} {self._name} {len(self._groups)} {count} {node}"
        )
        return node

    def cached(self, module, **options):
        """A module, or a function, that all ranks call in step."""
        options = {"distributed": "collective", "process_group": self.group, "probe": False} | options
        cached = torchcache(**options)(module)
        self._caches.append(cached.cache_instance)
        return cached

    def all(self, value):
        """The values of all ranks."""
        values = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def total(self, value):
        return sum(self.all(value), type(value)())

    def times_computed(self):
        """How often all ranks have computed each item, by the first value of the item."""
        mine = collections.Counter(
            item for batch in self.computed for item in batch.flatten(1)[:, 0].tolist()
        )
        return self.total(mine)

    def begin(self, net):
        """Make the first call of a kind, which computes the whole batch, with an item of this rank only."""
        net(-1.0 - ITEMS[self.rank][None])
        self.computed.clear()

    def check(self, net, batch, scale=2.0):
        assert_same(net(batch), expected(batch, scale))

    def _event(self, event, args):
        if event == "tests.computed":
            self.computed.append(args[0].clone())
            self.on_compute(*args)

    @contextlib.contextmanager
    def running(self):
        handler = logging.Handler()
        handler.emit = lambda record: self.warnings.append(record.getMessage())
        logger = logging.getLogger("torchcache2")
        logger.addHandler(handler)
        _heard[:] = [self._event]
        try:
            yield
        finally:
            _heard.clear()
            logger.removeHandler(handler)
            for cache in self._caches:
                cache.close()


@contextlib.contextmanager
def raises(kind, *texts, within=None):
    """That an error is raised whose text has these parts, at most so many seconds from now."""
    began = time.monotonic()
    caught = []
    try:
        yield caught
    except kind as error:
        seconds = time.monotonic() - began
        missing = [text for text in texts if text not in str(error)]
        assert type(error) is kind and not missing, f"{error!r} has no {missing}"
        assert within is None or seconds < within, f"{error!r} after {seconds:.1f} s"
        caught.append(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


def run_cases(prepare=lambda: None):
    """Run the cases of this script, or those whose names follow in its arguments; prints what came of each.

    All ranks call `prepare` before.
    """
    store, *names = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["TESTS_JOB"] = store
    timeout = datetime.timedelta(seconds=50)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
    )
    prepare()
    sys.addaudithook(lambda event, args: [heard(event, args) for heard in _heard])
    for function, count, seconds, number in _CASES:
        name, timeout = function.__name__, datetime.timedelta(seconds=seconds)
        if names and name not in names:
            continue
        dist.barrier()  # one may have waited for long in the last case
        # All ranks make all groups: torch names a group that only its members make by how many these have.
        groups = [dist.new_group(list(range(count)), timeout=timeout) for _ in range(number)]
        if rank >= count:
            continue
        began, text = time.monotonic(), ""
        try:
            ranks = Ranks(name, count, groups)
            with ranks.running():
                function(ranks)
        except BaseException:
            text = "".join(traceback.format_exc().splitlines(True)[-12:])
        print(json.dumps([name, text, time.monotonic() - began]), flush=True)
