"""What the ranks of a process group say to each other: bytes of any length, in step, over gloo.

A round of ``gather`` is one ``all_gather`` of blocks of the same size. A block is::

    uint32  how many bytes of payload follow; more than fit means: all ranks repeat with larger blocks
    uint32  a checksum of the kind of the round, and of how many rounds there were: the same on all ranks
    payload
    padding

How large the blocks of a kind of round are follows from the lengths that were gathered, so it is the same on
all ranks.

A rank that cannot go on says so in the store (`absent`) and closes its connections, and those that wait look
whether they still have theirs. So all ranks raise the same error at about the same time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, distributed

from torchcache2.core.errors import RankError
from torchcache2.core.private import group_store, group_timeout
from torchcache2.engine.collective.absent import Roll, Verdict

if TYPE_CHECKING:  # not all builds of torch have it
    from torch.distributed import ProcessGroup

__all__ = ["Channel"]

_HEAD = 8  # bytes of a block before its payload
_SMALLEST = 1 << 10  # bytes of payload
_REVIEW = 64  # after so many rounds of a kind, blocks get as small as the largest of these payloads allows
_SLICE = timedelta(seconds=0.3)  # so often a wait looks for Ctrl+C and for closed connections
_LONGER = timedelta(minutes=5)
_LOOKS = 8  # at so many connections; each look costs some bytes until the end of the channel
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED = 1 << 20  # a tag with which nothing is ever sent


class Channel:
    """How the ranks of a group speak to each other. All of them make it, and call its methods, in step.

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
        self.rank, self.size, self.seconds = group.rank(), group.size(), 0.0
        self._group = weakref.ref(group)
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._why: Verdict | None = None
        self._rounds: dict[str, _Round] = {}
        self._number = 0
        self._timeout = group_timeout(group, _devices(group))
        self._gloo: Any = None
        store = group_store(group)
        number = store.add(
            f"torchcache2/{self.rank}", 1
        )  # the same on all ranks: they make channels together
        self._store = distributed.distributed_c10d.PrefixStore(f"torchcache2/{number}", store)
        self._roll = Roll(self._store, distributed.get_process_group_ranks(group), self.rank, self._timeout)
        self._others = itertools.cycle(rank for rank in range(self.size) if rank != self.rank)

    def gather(self, kind: str, data: bytes) -> list[bytes]:
        """What each rank has given to this call, by rank. `kind` names rounds that have about one length."""
        with self._turn():
            self._number += 1
            mark = zlib.crc32(kind.encode(), self._number)
            found = self._rounds.get(kind) or _Round(self.size, _SMALLEST)
            while True:
                self._rounds[kind] = found
                found.write(data, mark)
                self._wait(self._gloo.allgather, [found.rows], [found.sent])
                if found.marks.tolist().count(mark) < self.size:
                    raise self._failed("they have made different calls")
                lengths = found.lengths.tolist()
                if max(lengths) <= found.capacity:
                    break
                found = _Round(self.size, _power(max(lengths)))
            wanted = found.wanted(max(lengths))
            if wanted < found.capacity:
                self._rounds[kind] = _Round(self.size, wanted)
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
        with self._turn():
            place, group = data.device, self._group()
            if place.type == "cpu" or group is None or place.type not in _devices(group):
                with torch.inference_mode(False):
                    result = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
                self._wait(self._gloo.alltoall_base, result, data.cpu(), list(received), list(sent))
                return result.to(place)
            with torch.inference_mode(False):
                result = torch.empty(sum(received), dtype=torch.uint8, device=place)
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
            why = why or f"rank {self.rank} has closed the exchange between the ranks"
            self._roll.fail(why)
            self._end(Verdict(why, (self.rank,)))

    def __del__(self) -> None:
        if self._pid != os.getpid():
            Channel._inherited.append(self._gloo)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise RankError(
                f"this process was forked from rank {self.rank}, and cannot speak for it: call the module in "
                "the rank itself"
            )
        if not self._lock.acquire(blocking=False):
            raise RankError(
                f"two threads of rank {self.rank} have called modules of one process group at once; only one "
                "thread of a rank can be in step with the other ranks",
                self.rank,
            )
        start = time.perf_counter()
        try:
            if self._why is None and self._gloo is None:
                self._connect()
            if self._why is not None:
                raise _error(self._why)
            yield
        except BaseException as error:
            self.close(f"rank {self.rank} cannot go on: {error!r}")
            raise
        finally:
            self.seconds += time.perf_counter() - start
            self._lock.release()

    def _connect(self) -> None:
        try:
            self._why = self._roll.meet()
            if self._why is None:
                # Not by `new_group`: its name for a group counts the groups that this rank is in, so ranks
                # that are in different numbers of groups would never meet. And with a longer timeout: when it
                # is over, gloo closes the connections, which would look as if this rank had ended.
                self._gloo = distributed.distributed_c10d.ProcessGroupGloo(
                    self._store, self.rank, self.size, self._timeout + _LONGER
                )
        except RuntimeError as error:
            raise self._failed(str(error)) from error

    def _wait(self, begin: Callable[..., Any], *args: Any) -> None:
        try:
            work, end = begin(*args), time.monotonic() + self._timeout.total_seconds()
            while not _is_done(work):
                try:
                    for rank in itertools.islice(self._others, min(_LOOKS, self.size - 1)):
                        self._look(rank)
                except RuntimeError:
                    if _is_done(work):  # a rank has ended after all that it had to send was sent
                        break
                    raise
                if time.monotonic() > end:
                    raise RuntimeError(f"{self._timeout.total_seconds():g} s are over")
        except RuntimeError as error:
            raise self._failed(str(error)) from error

    def _look(self, rank: int) -> Any:
        """Raise RuntimeError if the connection to a rank is closed."""
        return self._gloo.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, _UNUSED)

    def _failed(self, error: str) -> RankError:
        """Find out why this rank cannot go on, and let the others know that it cannot."""
        closed = []
        for rank in range(self.size) if self._gloo is not None else ():
            try:
                if rank != self.rank:
                    self._look(rank)
            except RuntimeError:
                closed.append(rank)
        self._roll.failed(closed)
        self._end(Verdict(error))
        self._why = self._roll.verdict(closed, error)
        return _error(self._why)

    def _end(self, why: Verdict) -> None:
        self._why = why
        for rank in range(self.size) if self._gloo is not None else ():
            # When a wait for a message ends without it, gloo closes the connections to all ranks. There is no
            # other way to close them that all supported versions of torch have.
            with contextlib.suppress(RuntimeError):
                if rank != self.rank:
                    self._look(rank).wait(_AT_ONCE)
        self._gloo = None


class _Round:
    """The buffers of one kind of round."""

    def __init__(self, size: int, capacity: int) -> None:
        self.capacity = capacity
        self._largest, self._left = _SMALLEST, _REVIEW
        with torch.inference_mode(False):  # or only calls in inference mode could use these buffers
            self.sent = torch.zeros(_HEAD + capacity, dtype=torch.uint8, device="cpu")
            every = torch.zeros(size, _HEAD + capacity, dtype=torch.uint8, device="cpu")
            self.rows = list(every)
        self.lengths, self.marks = every.numpy()[:, :_HEAD].view(np.uint32).T
        self._head = self.sent.numpy()[:_HEAD].view(np.uint32)
        self._written = self.sent.numpy().data
        self._read = [row.data for row in every.numpy()]

    def write(self, data: bytes, mark: int) -> None:
        self._head[:] = len(data), mark
        if len(data) <= self.capacity:
            self._written[_HEAD : _HEAD + len(data)] = data

    def read(self, lengths: Sequence[int]) -> list[bytes]:
        pairs = zip(self._read, lengths, strict=True)
        return [bytes(row[_HEAD : _HEAD + length]) for row, length in pairs]

    def wanted(self, length: int) -> int:
        """How large blocks should be after a round with this largest payload."""
        self._largest = max(self._largest, _power(length))
        self._left -= 1
        if self._left:
            return self.capacity
        wanted, self._largest, self._left = self._largest, _SMALLEST, _REVIEW
        return wanted


def _power(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()


def _error(why: Verdict) -> RankError:
    return RankError(why.text, why.ranks[0] if len(why.ranks) == 1 else None)


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
