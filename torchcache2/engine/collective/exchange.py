"""`Exchange`: the steps that all ranks of a process group take together.

In a step, each rank says which keys it does not find. What any rank has is sent to who asks, and what
nobody has is computed by exactly one rank that has the item. All ranks take part in all rounds of a step,
in the same order; what a round brings is the same for all, so all decide alike. A round is one
``all_gather`` of bytes; see `Channel.gather`. Numbers are little-endian.

1. **ask**: a `Header`, with the keys that this rank lacks. If any rank says that the rows of a namespace
   are to be dropped, all drop them, and repeat the round. If no rank asks for anything, the step ends here.
   **parts**, only if ranks call with different namespaces for the first time: JSON that says what the
   namespace of a rank stands for. The first rank then warns of what differs.
2. **have**: a byte for each key that was asked for, in the order of `Asked`: 1 if this rank has it. From
   this, each rank derives the same plan, which names one source for each key; see `planned`.
3. **tell**: the sources have read their rows, or computed them. `Told` says what came of it, and has a
   number of 2 bytes for each key of which this rank is the source and others ask for, in the order of
   `Asked`: 0 if its row cannot be sent, else which schema of the table in `Told` it has, from 1 on.
   **schema**, only if a digest is in such a table for the first time: for each new digest, in sorted order,
   the first rank that has it there says 4 bytes, the length of its text, and the text; see `SchemaTable`.
4. One ``all_to_all_single`` of bytes, only if rows are to be sent: from each source to each rank that asks
   for its keys, their rows, as `blocks` lays them out, by number of the schema, then in the order of
   `Asked`.
   **run**, only of sharded modules: a byte, 1 if this rank has to run its forward. If one has, all run
   theirs. They know it after round 1 already, and go on to no other, if a rank passes its call by, or finds
   rows of which no output can be made.

A stage between two rounds that raises does not keep a rank from the next round: there it says that it has
failed. Then all ranks raise: that rank its exception, and the others a `RankError`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from torchcache2.core.errors import RankError
from torchcache2.core.keys import Keys, Positions
from torchcache2.core.rows import Parts
from torchcache2.engine.batch import RefusedError
from torchcache2.engine.collective.apart import apart
from torchcache2.engine.collective.asked import Asked
from torchcache2.engine.collective.channel import Channel
from torchcache2.engine.collective.differing import Differing
from torchcache2.engine.collective.header import Flag, Header, Status, Told, are_alike, out_of_step
from torchcache2.engine.collective.holdings import AllHoldings
from torchcache2.engine.collective.known import make_known
from torchcache2.engine.collective.part import Part, Received
from torchcache2.engine.collective.plan import planned
from torchcache2.engine.collective.schemas import SchemaTable
from torchcache2.engine.collective.shipment import Shipment
from torchcache2.engine.values.outputs import stored
from torchcache2.identity.encoding import digest

__all__ = ["Exchange"]

T = TypeVar("T")
_CPU = torch.device("cpu")


class Exchange:
    """The steps that the ranks of a process group take together.

    One thread of a rank takes a step at a time. If a step is interrupted, the channel is closed, so that
    the other ranks do not wait.

    Parameters
    ----------
    channel : Channel
        Between the ranks of the group.

    Attributes
    ----------
    seconds : float
        Time spent in rounds, waiting for other ranks included; who counts it sets it back.
    steps : int
        How many were taken.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.seconds = 0.0
        self._do_all_know = False
        self._schemas = SchemaTable()
        self._differing = Differing()
        self._holdings = AllHoldings()
        self.steps = 0
        self._thread = threading.Lock()

    def step(self, part: Part) -> Received | None:
        """Take a step with all ranks; returns what it has brought, None if all ranks have left.

        Raises
        ------
        RankError
            If another rank has failed, ended or not come, or calls something else.
        Exception
            What this rank's own part has raised, after all others know.
        """
        with self._taken():
            self.steps += 1
            headers = self._ask(part)
            active = [header for header in headers if not header.flags & Flag.DONE]
            if part.flags & Flag.DONE and active:  # others may call other modules
                part.holdings = self._holdings.of(active[0].caller, part.holdings)
            if headers and not active:
                return None
            if headers and all(header.flags & Flag.BYPASS for header in active):
                return Received(all_pass=True)
            if _all_must_run(headers):
                return Received(lacking=np.arange(len(headers[self.channel.rank].keys)), must_run=True)
            if not any(len(header.keys) for header in headers):
                return Received()
            return self._answered(part, headers, Asked.of(headers, self.channel.rank))

    @contextlib.contextmanager
    def _taken(self) -> Iterator[None]:
        """Keep other threads out; if this one leaves a step that others are in, close the channel."""
        if not self._thread.acquire(blocking=False):
            raise RankError(
                "two threads of this rank call modules with distributed='collective' at once: the ranks "
                "cannot know in which order to answer. Call them from one thread, or give each its own "
                "process_group"
            )
        self._do_all_know = False
        before = self.channel.seconds
        try:
            with apart():  # not all ranks compute, so modules within this one are called by some only
                yield
        except BaseException:
            if not self._do_all_know:
                self.channel.close()
            raise
        finally:
            self.seconds += self.channel.seconds - before
            self._thread.release()

    def _ask(self, part: Part) -> list[Header]:
        """Round 1: what all ranks say; nothing if no rank needs anything."""
        while True:
            failure: Exception | None = None
            keys, flags = np.empty((0, 16), np.uint8), Flag(0)
            try:
                keys = part.find()
                flags = part.flags
            except Exception as error:
                failure, flags = error, Flag.FAILED
            caller, holdings = digest([part.caller.encode()]), part.holdings
            self._holdings.add(caller, holdings)
            dropped = next(iter(holdings.dropped), b"")
            header = Header(
                step=self.steps,
                flags=flags | (Flag.DROP if dropped else Flag(0)) | (Flag.CUDA * self._is_on_gpu(part)),
                caller=caller,
                namespace=part.namespace,
                place=holdings.place,
                dropped=dropped or bytes(16),
                message=part.caller if failure is None else _text_of(failure),
                keys=keys,
            )
            said = self.channel.gather("ask", mine := header.to_bytes())
            if header.is_content and all(are_alike(mine, data) for data in said):
                return []
            headers = _read(Header.of, said)
            self._check_failures([(one.flags & Flag.FAILED != 0, one.message) for one in headers], failure)
            if text := out_of_step(headers):
                self._do_all_know = True
                raise make_known(RankError(text), self, self.steps)
            holdings.dropped.pop(dropped, None)
            all_dropped = {one.dropped for one in headers if one.flags & Flag.DROP}
            if not all_dropped:
                self._differing.look(self.channel, part, headers)
                return headers
            self._holdings.drop(all_dropped)

    def _answered(self, part: Part, headers: list[Header], asked: Asked) -> Received:
        """Rounds 2 to 4, and "run"."""
        rank, failure = self.channel.rank, None
        has = np.zeros(len(asked), np.uint8)
        try:
            # What this rank asks for it does not have.
            for numbers, keys in asked.keys_at(np.flatnonzero(~asked.by[:, rank])):
                has[numbers] = part.holdings.has(keys)
        except Exception as error:
            failure = error
        said = self.channel.gather("have", has.tobytes())
        held = np.stack([np.frombuffer(data, np.uint8) for data in said], axis=1) != 0
        is_sharded = any(header.flags & Flag.SHARDED for header in headers)
        whole = np.array([header.flags & Flag.WHOLE != 0 for header in headers])
        plan = planned(asked.words, asked.by & (not is_sharded), held, whole, self.steps)
        told = Told()
        parts: Parts = []
        own: Parts = []
        refusal: RefusedError | None = None
        if failure is None:
            try:
                for those, keys in asked.keys_at(np.flatnonzero((plan.source == rank) & held.any(axis=1))):
                    parts += [(those[positions], rows) for positions, rows in part.holdings.get(keys)]
                mine = asked.mine
                computed = np.flatnonzero((plan.source[mine] == rank) & ~held[mine].any(axis=1))
                if len(computed):
                    rows = part.compute(computed)
                    assert rows is not None
                    own = [(computed[where], one) for where, one in stored(rows)]
                    parts += [(mine[where], one) for where, one in own]
            except RefusedError as stop:
                refusal = stop
                told.status, told.reason, told.text = Status.NOT_STORED, stop.reason, stop.text
            except Exception as error:
                failure = error
        shipment = Shipment(asked, plan.source, rank, self._schemas)
        if failure is None:
            try:
                shipment.load(parts, told)
                told.reason = part.note() if whole.any() and refusal is None else told.reason
            except Exception as error:
                failure = error
        if failure is not None:
            told.status, told.text = Status.FAILED, _text_of(failure)
        heard = _read(Told.of, self.channel.gather("tell", told.to_bytes()))
        self._check_failures([(one.status == Status.FAILED, one.text) for one in heard], failure)
        self._schemas.tell([one.digests for one in heard], self.channel)
        received = self._swapped(shipment, heard, headers, part)
        received.parts += own
        received.notes = [one.reason for one in heard if one.status == Status.OK]
        received.lacking = _others(len(asked.mine), received.parts)
        if is_sharded:
            must_run = len(received.lacking) > 0 or not part.is_enough(received)
            received.must_run = any(data[0] for data in self.channel.gather("run", bytes([must_run])))
        lacking = asked.mine[received.lacking]
        for source in np.unique(plan.source[lacking[~held[lacking].any(axis=1)]]):
            if source >= 0 and source != rank and heard[source].status == Status.NOT_STORED:
                received.refused = heard[source].reason, heard[source].text
        received.refusal = refusal
        return received

    def _swapped(
        self, shipment: Shipment, heard: Sequence[Told], headers: Sequence[Header], part: Part
    ) -> Received:
        """Round 4: the rows that other ranks send to this one."""
        received = Received()
        if not shipment.announced(heard):
            return received
        is_on_gpu = all(header.flags & Flag.CUDA for header in headers)
        data, sent = shipment.packed(part.device if is_on_gpu else _CPU)
        data = self.channel.swap(data, sent, shipment.expected())
        for source, numbers, rows in shipment.unpacked(data):
            received.parts.append((shipment.positions(numbers), rows))
            received.from_others += len(numbers)
            if headers[source].place != part.holdings.place:
                keys = Keys(part.namespace, shipment.asked.data[numbers], part.group)
                part.holdings.put_replicas(keys, rows)
        received.to_others = shipment.rows_sent
        return received

    def _check_failures(self, said: Sequence[tuple[bool, str]], own: Exception | None) -> None:
        """Raise if a rank has failed: its own exception in that rank, a `RankError` in the others."""
        failed = [rank for rank, (has_failed, _) in enumerate(said) if has_failed]
        if failed:
            rank = failed[0]
            text = f"rank {rank} has failed, so that no rank goes on: {said[rank][1]}"
            self._do_all_know = True
            raise make_known(RankError(text, rank) if own is None else own, self, self.steps)

    def _is_on_gpu(self, part: Part) -> bool:
        return part.device.type == "cuda" and self.channel.sends_from(part.device)


def _read(of: Callable[[bytes], T], said: Sequence[bytes]) -> list[T]:
    """What the ranks have said; `RankError` if one has another version of this library, which says it so."""
    read = []
    for rank, data in enumerate(said):
        try:
            read.append(of(data))
        except ValueError as error:
            text = f"what rank {rank} says cannot be read: {error}. All ranks need the same torchcache2"
            raise RankError(text, rank) from None
    return read


def _all_must_run(headers: Sequence[Header]) -> bool:
    """Whether all ranks run the forward of a sharded module, as is known after the first round."""
    is_sharded = any(header.flags & Flag.SHARDED for header in headers)
    return is_sharded and any(header.flags & (Flag.RUN | Flag.BYPASS) for header in headers)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _others(count: int, parts: Parts) -> Positions:
    """Which of `count` keys no part has."""
    is_there = np.zeros(count, bool)
    for positions, _ in parts:
        is_there[positions] = True
    return np.flatnonzero(~is_there)
