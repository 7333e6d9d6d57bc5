"""What the ranks of a process group say to each other: bytes of any length, in step, over gloo.

In a round of ``gather``, each rank sends the same block to all, by one ``all_to_all``: on 4 ranks that takes
half of the time of an ``all_gather``, which passes blocks on from rank to rank. A block is::

    uint32  how many bytes of payload follow; more than fit means: all ranks repeat with larger blocks
    uint32  a checksum of the kind of the round, and of how many rounds there were: the same on all ranks
    payload
    padding

How large blocks are follows from the lengths that were gathered, so it is the same on all ranks, also if they
make different calls: gloo ends a process that gets more bytes than it expects.

While a rank waits, it looks whether its connections are open, and whether the timeout of the group is over. A
rank that cannot go on says so in the store over which the group has met, so that all raise the same error::

    here/RANK    this rank has come to its first round
    failed/RANK  this rank cannot go on; it says so before it closes its connections
    verdict      why no rank can go on (JSON): the first rank that knows writes it, and all others take it

So a rank that is closed and has not failed has ended, and one that has said nothing at all has not come.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, distributed

from torchcache2.core.errors import RankError
from torchcache2.core.private import group_store, group_timeout

if TYPE_CHECKING:  # not all builds of torch have it
    from torch.distributed import ProcessGroup


_HEAD = struct.Struct("<II")  # of a block, before its payload
_SMALLEST = 1 << 10  # bytes of payload
_REVIEW = 64  # after so many rounds that need half of their blocks at most, these get smaller
_SLICE = timedelta(seconds=0.3)  # so often a wait looks for Ctrl+C and for closed connections
_LONGER = timedelta(minutes=5)
_LOOKS = 8  # at so many connections; each look costs some bytes until the end of the channel
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED = 1 << 20  # a tag with which nothing is ever sent
_PATIENCE = 1.5  # seconds until ranks that have not failed count as missing; those that wait notice in 0.3 s
_STORE = 2.0  # seconds until a store that does not answer is given up
_ENDED = "ended, so the others cannot go on: see what it printed last"
_LATE = (
    "not come to this call within {:g} s, which is the timeout of the process group: with "
    "distributed='collective', all ranks have to make the same calls; see cache.join() and cache.alone()"
)
_PAUSE = 0.001, 0.05  # seconds between two looks at the store: the first one, and the longest


def _nothing() -> None:
    pass


Verdict = tuple[str, "int | None"]  # why no rank can go on, and the rank that is to blame, if it is one


class Channel:
    """How the ranks of a group speak to each other. All of them make it, and call its methods, in step.

    One thread of the process that has made it calls them; see `Exchange`.

    It has connections of its own, made in the first round, so nothing mixes with what the program sends over
    the group. It does not keep the group.

    Attributes
    ----------
    rank, size : int
        Which rank of the group this is, and how many there are.
    seconds : float
        How long this rank has been in its methods.
    """

    # A forked process has the parent's groups, but not their threads, for which their destructor would wait.
    _inherited: ClassVar[list[Any]] = []

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size, self.seconds, self._since = group.rank(), group.size(), 0.0, 0.0
        self._group = weakref.ref(group)
        self._pid = os.getpid()
        self._why: Verdict | None = None
        self._round: _Round | None = None
        self._number = 0
        self._timeout = group_timeout(group, _devices(group))
        self._gloo: Any = None
        store = group_store(group)
        number = store.add(
            f"torchcache2/{self.rank}", 1
        )  # the same on all ranks: they make channels together
        self._store = distributed.distributed_c10d.PrefixStore(f"torchcache2/{number}", store)
        self._ranks = distributed.get_process_group_ranks(group)  # their numbers among all, for messages
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._next = itertools.cycle(self._others)

    def gather(self, kind: str, data: bytes, meanwhile: Callable[[], None] = _nothing) -> list[bytes]:
        """What each rank has given to this call, by rank. `kind` is the same on ranks that are in step.

        ``meanwhile()`` is called once the data is on its way.
        """
        with self:
            self._number += 1
            mark = zlib.crc32(kind.encode(), self._number)
            found = self._round or _Round(self.size, _SMALLEST)
            while True:
                found.write(data, mark)
                self._wait(self._gloo.alltoall_base, found.received, found.sent, [], [], meanwhile=meanwhile)
                meanwhile = _nothing
                lengths, marks = found.heads.tolist()
                if marks.count(mark) < self.size:
                    raise self._failed("they have made different calls")
                needed = 1 << max(max(lengths) - 1, _SMALLEST - 1).bit_length()
                if needed <= found.capacity:
                    break
                found = _Round(self.size, needed)
            found.too_large = found.too_large + 1 if needed < found.capacity else 0
            self._round = found if found.too_large < _REVIEW else _Round(self.size, needed)
            return found.read(lengths)

    def swap(self, data: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send to each rank its part of some bytes, and return what all have sent to this one, by rank.

        Parameters
        ----------
        data : Tensor, uint8, (sum of `sent`,)
            On another device than the CPU, it goes through the user's group if that can do it.
        sent, received : sequence of int
            How many bytes go to each rank, and come from each.

        Returns
        -------
        Tensor, uint8, (sum of `received`,)
            On the device of `data`.
        """
        with self:
            place, group = data.device, self._group()
            is_direct = group is not None and self.sends_from(place)
            with torch.inference_mode(False):
                result = torch.empty(
                    sum(received), dtype=torch.uint8, device=place if is_direct else torch.device("cpu")
                )
            if group is None or not is_direct:
                self._wait(self._gloo.alltoall_base, result, data.cpu(), list(received), list(sent))
                return result.to(place)
            try:  # not in slices: NCCL takes the end of a wait for a failure
                group.alltoall_base(result, data, list(received), list(sent)).wait()
            except RuntimeError as error:
                raise self._failed(str(error)) from error
            return result

    def sends_from(self, device: torch.device) -> bool:
        """Whether the user's group sends tensors of a type of device, so that they need not be on the CPU."""
        group = self._group()
        return group is not None and device.type != "cpu" and device.type in _devices(group)

    def close(self, why: str = "") -> None:
        """Give up the connections, so that no rank waits. Later calls of all ranks raise `RankError`."""
        if self._pid == os.getpid() and self._why is None:
            text = why or f"rank {self.rank} has closed the exchange between the ranks"
            self._why = text, self.rank
            self._asked(lambda: self._settled(text, self.rank))
            self._end()

    def __del__(self) -> None:
        if self._pid != os.getpid():
            Channel._inherited.append(self._gloo)

    def __enter__(self) -> None:
        """Begin to speak with the other ranks."""
        self._since = time.perf_counter()
        if self._why is None and self._gloo is None:
            try:
                self._connect()
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise
        if self._why is not None:
            raise RankError(*self._why)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Let the others know if this rank cannot go on."""
        self.seconds += time.perf_counter() - self._since
        if error is not None:
            self.close(f"rank {self.rank} cannot go on: {error!r}")

    def _connect(self) -> None:
        try:
            self._why = self._met("here", self._timeout.total_seconds())
            if self._why is None:
                # Not by `new_group`: its name for a group counts the groups that this rank is in, so ranks
                # that are in different numbers of groups would never meet. And with a longer timeout: when it
                # is over, gloo closes the connections, which would look as if this rank had ended.
                self._gloo = distributed.distributed_c10d.ProcessGroupGloo(
                    self._store, self.rank, self.size, self._timeout + _LONGER
                )
        except RuntimeError as error:
            raise self._failed(str(error)) from error

    def _wait(self, begin: Callable[..., Any], *args: Any, meanwhile: Callable[[], None] = _nothing) -> None:
        try:
            work = begin(*args)
            meanwhile()
            end = time.monotonic() + self._timeout.total_seconds()
            while not _is_done(work):
                if self._closed(itertools.islice(self._next, min(_LOOKS, self.size - 1))):
                    if _is_done(work):  # a rank has ended after all that it had to send was sent
                        break
                    raise RuntimeError("a connection is closed")
                if time.monotonic() > end:
                    raise RuntimeError(f"{self._timeout.total_seconds():g} s are over")
        except RuntimeError as error:
            raise self._failed(str(error)) from error

    def _look(self, rank: int) -> Any:
        """Raise RuntimeError if the connection to a rank is closed."""
        return self._gloo.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, _UNUSED)

    def _closed(self, ranks: Iterator[int] | Sequence[int]) -> list[int]:
        """Those of some other ranks to which the connection is closed."""
        closed = []
        for rank in ranks if self._gloo is not None else ():
            try:
                self._look(rank)
            except RuntimeError:
                closed.append(rank)
        return closed

    def _end(self) -> None:
        for rank in self._others if self._gloo is not None else ():
            # When a wait for a message ends without it, gloo closes the connections to all ranks. There is no
            # other way to close them that all supported versions of torch have.
            with contextlib.suppress(RuntimeError):
                self._look(rank).wait(_AT_ONCE)
        self._gloo = None

    def _failed(self, error: str) -> RankError:
        """Find out with the other ranks why none can go on, and close the connections of this one."""

        def found() -> Verdict:
            text = f"the ranks are out of step, or have lost their connection: {error}"
            return self._met("failed", _PATIENCE) or self._settled(text, None)

        self._why = self._asked(found, _PATIENCE + _STORE)
        if self._why is None:
            # The store does not answer. Most often the rank that held it has ended: rank 0 of all ranks.
            closed = self._closed(self._others)
            gone = [rank for rank in closed if self._ranks[rank] == 0] or closed
            text = (
                f"the exchange between the ranks has failed: {error}; nor does the store of the group answer"
            )
            self._why = self._blamed(gone, _ENDED) if gone else (text, None)
        self._end()
        return RankError(*self._why)

    def _met(self, mark: str, seconds: float) -> Verdict | None:
        """Leave a mark, and wait until all ranks have done so; otherwise returns why they cannot continue."""
        self._store.set(f"{mark}/{self.rank}", "1")
        marks = [f"{mark}/{rank}" for rank in range(self.size)]
        late = _LATE.format(self._timeout.total_seconds())
        end, pause = time.monotonic() + seconds, _PAUSE[0]
        while not self._store.check(["verdict"]):
            if self._store.check(marks):
                return None
            closed = self._closed(self._others)
            if gone := [rank for rank in closed if not self._store.check([f"failed/{rank}"])]:
                return self._settled(*self._blamed(gone, _ENDED))
            if time.monotonic() > end:
                missing = [rank for rank in range(self.size) if not self._store.check([marks[rank]])]
                return self._settled(*self._blamed(missing, late)) if missing else None
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE[1])
        return self._settled("", None)

    def _settled(self, text: str, rank: int | None) -> Verdict:
        """The verdict of the first rank that has one."""
        text, rank = json.loads(self._store.compare_set("verdict", "", json.dumps([text, rank])))
        return text, rank

    def _asked(self, question: Callable[[], Verdict], seconds: float = _STORE) -> Verdict | None:
        """The answer of the store; None if it has failed, or does not answer."""
        answers: list[Verdict] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                answers.append(question())

        thread = threading.Thread(target=ask, daemon=True, name="torchcache2-verdict")
        thread.start()
        thread.join(seconds)
        return answers[0] if answers else None

    def _blamed(self, ranks: Sequence[int], what: str) -> Verdict:
        names = [
            str(rank) if self._ranks[rank] == rank else f"{rank} of the group ({self._ranks[rank]} of all)"
            for rank in ranks
        ]
        if len(names) == 1:
            return f"rank {names[0]} has {what}", ranks[0]
        return f"ranks {', '.join(names)} have {what}", None


class _Round:
    """The buffers of a round."""

    def __init__(self, size: int, capacity: int) -> None:
        self.capacity, self.too_large = capacity, 0
        width = _HEAD.size + capacity
        with torch.inference_mode(False):  # or only calls in inference mode could use these buffers
            self.sent, self.received = torch.zeros(2, size, width, dtype=torch.uint8, device="cpu").unbind()
        self._sent, received = self.sent.numpy(), self.received.numpy()
        self.heads = received[:, : _HEAD.size].view(np.uint32).T  # the lengths, and the marks
        self._payloads = [row[_HEAD.size :].data for row in received]

    def write(self, data: bytes, mark: int) -> None:
        block = _HEAD.pack(len(data), mark) + (data if len(data) <= self.capacity else b"")
        self._sent[:, : len(block)] = np.frombuffer(block, np.uint8)

    def read(self, lengths: Sequence[int]) -> list[bytes]:
        return [bytes(data[:length]) for data, length in zip(self._payloads, lengths, strict=True)]


def _is_done(work: Any) -> bool:
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if work.is_completed():
            work.wait()  # it raises the error of the work itself, if that was not what has been raised
            return True
        return False
    return True


def _devices(group: ProcessGroup) -> list[str]:
    """The types of devices of which a group sends tensors."""
    parts = distributed.get_backend_config(group).split(",")  # such as "cpu:gloo,cuda:nccl"
    return [part.partition(":")[0] for part in parts]
