"""Messages of any length between the ranks of a process group, in step, over gloo.

In a round of ``gather``, each rank sends the same block to all, by one ``all_to_all``: on 4 ranks this is
twice as fast as an ``all_gather``, which passes blocks from rank to rank. A block is::

    uint32  how many bytes of payload follow; more than fit means: all ranks repeat with larger blocks
    uint32  a checksum of the kind of the round, and of how many rounds there were: the same on all ranks
    payload
    padding

The size of blocks follows from the gathered lengths, so it is equal on all ranks, even if they make different
calls: gloo kills a process that gets more bytes than it expects.

A waiting rank checks whether its connections are open, and whether the group's timeout is over. A rank that
cannot continue says so in the group's store, so that all raise the same error::

    here/RANK    this rank has reached its first round
    failed/RANK  this rank cannot continue; written before it closes its connections
    verdict      why no rank can continue (JSON): written by the first rank that knows, used by all

So a rank with closed connections and no ``failed`` has ended, and one without ``here`` has not arrived.
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
_REVIEW = 64  # rounds that need at most half of their blocks, after which blocks shrink
_SLICE = timedelta(seconds=0.3)  # interval at which a wait checks for Ctrl+C and closed connections
_LONGER = timedelta(minutes=5)
_LOOKS = 8  # connections per check; each check costs some bytes for the life of the channel
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED = 1 << 20  # a tag that no message ever has
_PATIENCE = 1.5  # seconds until ranks without `failed` count as missing; waiting ranks notice in 0.3 s
_STORE = 2.0  # seconds to wait for an answer of the store
_ENDED = "ended, so the others cannot continue: see its last output"
_LATE = (
    "not come to this call within {:g} s, which is the timeout of the process group: with "
    "distributed='collective', all ranks have to make the same calls; see cache.join() and cache.alone()"
)
_PAUSE = 0.001, 0.05  # seconds between polls of the store: first, and longest


def _nothing() -> None:
    pass


Verdict = tuple[str, "int | None"]  # why no rank can continue, and the rank to blame, if it is one


class Channel:
    """Messages between the ranks of a group, all of which make it and call its methods in step.

    Only one thread of its process may call them; see `Exchange`.

    It opens its own connections in the first round, so its messages never mix with the program's. It does not
    keep the group alive.

    Attributes
    ----------
    rank, size : int
        This rank's number in the group, and the number of ranks.
    seconds : float
        Time that this rank has spent in its methods.
    """

    # Kept alive: a forked process lacks the threads that the destructors of inherited groups would wait for.
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
        self._ranks = distributed.get_process_group_ranks(group)  # their global numbers, for messages
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._next = itertools.cycle(self._others)

    def gather(self, kind: str, data: bytes, meanwhile: Callable[[], None] = _nothing) -> list[bytes]:
        """Exchange `data` among all ranks; returns theirs, by rank. Ranks in step have the same `kind`.

        Calls ``meanwhile()`` once the data is being sent.
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
        """Send each rank its part of `data`, and return what all ranks sent to this one, by rank.

        Parameters
        ----------
        data : Tensor, uint8, (sum of `sent`,)
            From a device other than the CPU, it goes through the user's group if that supports it.
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
            try:  # in one wait: NCCL takes an expired wait for a failure
                group.alltoall_base(result, data, list(received), list(sent)).wait()
            except RuntimeError as error:
                raise self._failed(str(error)) from error
            return result

    def sends_from(self, device: torch.device) -> bool:
        """Whether the user's group can send tensors on this device, without a copy to the CPU."""
        group = self._group()
        return group is not None and device.type != "cpu" and device.type in _devices(group)

    def close(self, why: str = "") -> None:
        """Close the connections, so that no rank waits. Later calls of all ranks raise `RankError`."""
        if self._pid == os.getpid() and self._why is None:
            text = why or f"rank {self.rank} has closed the exchange between the ranks"
            self._why = text, self.rank
            self._asked(lambda: self._settled(text, self.rank))
            self._end()

    def __del__(self) -> None:
        if self._pid != os.getpid():
            Channel._inherited.append(self._gloo)

    def __enter__(self) -> None:
        """Connect to the other ranks if need be; raise `RankError` if the channel has failed."""
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
        """Tell the other ranks if this rank cannot continue."""
        self.seconds += time.perf_counter() - self._since
        if error is not None:
            self.close(f"rank {self.rank} cannot continue: {error!r}")

    def _connect(self) -> None:
        try:
            self._why = self._met("here", self._timeout.total_seconds())
            if self._why is None:
                # Not `new_group`: its names count the groups of this rank, so ranks in different numbers of
                # groups would never meet. With a longer timeout: when it expires, gloo closes the
                # connections, as if this rank had ended.
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
                    if _is_done(work):  # a rank has ended after sending everything
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
        """The ranks among `ranks` with a closed connection."""
        closed = []
        for rank in ranks if self._gloo is not None else ():
            try:
                self._look(rank)
            except RuntimeError:
                closed.append(rank)
        return closed

    def _end(self) -> None:
        for rank in self._others if self._gloo is not None else ():
            # When a wait for a message expires, gloo closes the connections to all ranks. Not all supported
            # versions of torch have another way to close them.
            with contextlib.suppress(RuntimeError):
                self._look(rank).wait(_AT_ONCE)
        self._gloo = None

    def _failed(self, error: str) -> RankError:
        """Agree with the other ranks on the cause of a failure, and close this rank's connections."""

        def found() -> Verdict:
            text = f"the ranks are out of step, or have lost their connection: {error}"
            return self._met("failed", _PATIENCE) or self._settled(text, None)

        self._why = self._asked(found, _PATIENCE + _STORE)
        if self._why is None:
            # The store does not answer. Most likely its rank has ended: global rank 0.
            closed = self._closed(self._others)
            gone = [rank for rank in closed if self._ranks[rank] == 0] or closed
            text = (
                f"the exchange between the ranks has failed: {error}; and the group's store does not answer"
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
        """Propose a verdict; returns that of the first rank to do so."""
        text, rank = json.loads(self._store.compare_set("verdict", "", json.dumps([text, rank])))
        return text, rank

    def _asked(self, question: Callable[[], Verdict], seconds: float = _STORE) -> Verdict | None:
        """The store's answer; None if it fails, or does not answer."""
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
        with torch.inference_mode(False):  # else only inference mode could use these buffers
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
            work.wait()  # raises the work's own error, if there is one
            return True
        return False
    return True


def _devices(group: ProcessGroup) -> list[str]:
    """The types of devices whose tensors a group can send."""
    parts = distributed.get_backend_config(group).split(",")  # such as "cpu:gloo,cuda:nccl"
    return [part.partition(":")[0] for part in parts]
