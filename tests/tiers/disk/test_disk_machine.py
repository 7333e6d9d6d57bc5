"""Handles of one directory put, get, flush, crash, reopen, evict, drop, meet damage: a dict that may forget.

Whatever is found must be what was put. What was flushed and fits the budget must be found by every handle,
and what a handle has kept by that handle, until somebody drops, damages or evicts it.
"""

import os
import shutil
import tempfile
import threading
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors import safe_open

from tests.helpers.storage import (
    NAMESPACES,
    NEVER,
    Mortal,
    abandon,
    flip,
    key_of,
    keys_of,
    put,
    refuse,
    segments,
    size_of,
    strange_files,
)
from tests.tiers import machine
from tests.tiers.machine import NAMES, SOME, WIDTHS, rows, width_of
from torchcache2.files import indexfile as merging
from torchcache2.tiers.disk import index
from torchcache2.tiers.disk.tier import DiskTier

SOAK = bool(os.environ.get("SOAK"))
SPACES = NAMESPACES[:2]
LARGE = 10**9
SMALL = 12_000  # room for a few of the widest rows


def cost_of(rows):
    """More bytes than segments of these rows have."""
    return 6_000 + sum(2_000 if width_of(name) == 200 else 50 for _, name in rows)


def rows_in(file):
    """The rows whose keys a segment has."""
    with safe_open(file, "np") as segment:
        keys = set(map(bytes, segment.get_tensor("keys")))
        space = bytes.fromhex(segment.metadata()["namespace"])
    return {(space, name) for name in NAMES if key_of(name) in keys}


class Handle(machine.Handle):
    """It also knows the namespaces that it uses."""

    def __init__(self, path, options):
        self.path, self.fs, self.holds = path, Mortal(), set()
        super().__init__(DiskTier(path, *options, delay=NEVER, fs=self.fs))

    def look(self, space):
        """Ask for what nobody has put: segments of others are looked for, and count as in use."""
        assert self.tier.get(keys_of(["never put"], space)).parts == []
        if segments(self.path, space):
            self.holds.add(space)

    def put(self, names, space):
        self.look(space)
        self.get(names, space)  # may meet files that are gone
        before, count = self.get(names, space), 0
        for width in WIDTHS:
            mine = [name for name in names if width_of(name) == width]
            count += put(self.tier, mine, width, space)
        new = self.get(names, space) - before
        self.waiting |= new
        return before, new, count


class Directory(RuleBasedStateMachine):
    names = SOME
    spaces = st.sampled_from(SPACES)
    which = st.integers(0, 2)

    @initialize(
        policy=st.sampled_from(["keep", "lru"]),
        budget=st.sampled_from([LARGE, SMALL]),
        codec=st.sampled_from(["none", "brotli"]),
        threads=st.booleans(),
        runs=st.booleans(),
    )
    def make(self, policy, budget, codec, threads, runs):
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(index, "_LOOK_EVERY", 0.0)
        if runs:
            self.patches.setattr(merging, "_LEAST_ROWS", 10)
            self.patches.setattr(merging, "_MERGED", 3)
        if not threads:
            self.patches.setattr(threading.Thread, "start", refuse)  # whoever flushes writes
        self.folder = tempfile.mkdtemp()
        self.path = Path(self.folder) / "cache"
        self.policy, self.budget, self.threads = policy, budget, threads
        self.options = (budget, policy, codec)
        self.small = budget == SMALL
        self.handles = [Handle(self.path, self.options) for _ in range(2)]
        self.sealed = set()  # what every handle must find
        self.damaged = set()
        self.gone = self.small  # whether files have been deleted or moved
        self.largest = 0

    def handle(self, which):
        return self.handles[which % len(self.handles)]

    def found(self, handle, names, space):
        """What a handle finds; in a second try, if it may first meet files that are gone or damaged."""
        here = handle.get(names, space)
        return here | handle.get(names, space) if self.gone else here

    def may_have_evicted(self):
        """Somebody wrote: what may be gone, if there was no room.

        A thread may write at any time: what was not held until now may be gone, whoever holds it from now on.
        """
        if self.small and self.policy == "lru":
            self.sealed.clear()
        elif self.small:
            held = set().union(*(handle.holds for handle in self.handles))
            self.sealed = {row for row in self.sealed if row[0] in held}

    def seal(self, handle):
        """A flush has returned."""
        self.may_have_evicted()
        waited, handle.waiting = handle.waiting, set()
        handle.holds |= {space for space, _ in waited}
        if not self.small:
            self.sealed |= waited
            return
        reader = Handle(self.path, self.options)
        here = set().union(*(self.found(reader, NAMES, space) for space in SPACES))
        reader.tier.close()
        assert here >= self.sealed
        if self.policy == "lru" and not self.threads and cost_of(waited) <= self.budget:
            assert here >= waited
        self.sealed = here

    @rule(which=which, names=names, space=spaces)
    def put(self, which, names, space):
        handle = self.handle(which)
        if self.threads:
            self.may_have_evicted()
        before, new, count = handle.put(names, space)
        if not self.small:
            assert before | new == rows(names, space)
            assert len(new) == count

    @rule(which=which, names=names, space=spaces)
    def put_and_flush(self, which, names, space):
        self.put(which, names, space)
        self.flush(which)

    @rule(names=names, space=spaces)
    def get(self, names, space):
        if self.threads:
            self.may_have_evicted()
        for handle in self.handles:
            handle.look(space)
            expected = {row for row in self.sealed | handle.waiting if row[0] == space}
            if self.small and self.threads:  # it may have found no room, and another one have made some
                expected = set()
            asked = [*names, *sorted({name for _, name in expected}.difference(names))]
            assert self.found(handle, asked, space) >= expected

    @rule(which=which)
    def flush(self, which):
        handle = self.handle(which)
        handle.tier.flush()
        self.seal(handle)

    @rule(which=which, end=st.sampled_from(["reopen", "crash", "crash in flush"]), calls=st.integers(0, 60))
    def end(self, which, end, calls):
        handle = self.handle(which)
        if end == "reopen":
            handle.tier.close()
            handle.holds.clear()
            self.seal(handle)
        elif end == "crash":
            abandon(handle.tier, handle.fs)
        else:
            handle.fs.die(calls)
            handle.tier.flush()
            if handle.fs.is_dead:
                self.may_have_evicted()
            else:
                self.seal(handle)
            abandon(handle.tier, handle.fs)
        self.handles.remove(handle)
        self.handles.append(Handle(self.path, self.options))

    @precondition(lambda self: len(self.handles) < 3)
    @rule()
    def open_another(self):
        self.handles.append(Handle(self.path, self.options))

    @rule(which=which, space=spaces)
    def drop(self, which, space):
        handle = self.handle(which)
        handle.tier.drop(space)
        self.gone = True
        self.sealed -= rows(NAMES, space)
        handle.waiting -= rows(NAMES, space)
        handle.holds.discard(space)
        if not self.threads:  # else another handle's thread may write at any time
            assert handle.get(NAMES, space) == set()

    @rule(which=which, space=spaces, place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def damage(self, which, space, place, bit):
        files = [file for file in segments(self.path, space) if file not in self.damaged]
        if files and not (self.small and self.threads):
            file = files[which % len(files)]
            lost = rows_in(file).difference(*(rows_in(other) for other in files if other != file))
            flip(file, int(place * file.stat().st_size), 1 << bit)
            self.damaged.add(file)
            self.gone = True
            self.sealed -= lost

    @rule(which=which, space=spaces, place=st.floats(0, 1, exclude_max=True), cut=st.booleans())
    def damage_a_run(self, which, space, place, cut):
        """Runs say nothing that segments do not say: no row is lost, or another one found."""
        files = [file for file in sorted(self.path.glob(f"{space.hex()}/*.run")) if file.stat().st_size]
        if files:
            file = files[which % len(files)]
            size = int(place * file.stat().st_size)
            if cut:
                os.truncate(file, size)
            else:
                flip(file, size)
            self.gone = True

    @invariant()
    def nothing_fails(self):
        if hasattr(self, "handles"):
            for handle in self.handles:
                stats = handle.tier.stats()
                assert stats.faults == 0
                assert self.small or stats.evictions == 0
            if not self.threads:  # else they write and delete meanwhile
                sizes = [file.stat().st_size for file in (*segments(self.path), *self.path.glob("*/*.run"))]
                self.largest = max([self.largest, *sizes])
                assert size_of(self.path) <= self.budget + len(self.handles) * self.largest

    def teardown(self):
        if not hasattr(self, "handles"):
            return
        try:
            for handle in self.handles:
                handle.tier.close()
                handle.holds.clear()
                self.seal(handle)
                handle.holds.clear()
            last = Handle(self.path, self.options)
            here = set().union(*(self.found(last, NAMES, space) for space in SPACES))
            last.tier.close()
            assert here >= self.sealed
            # Whatever has happened, nobody has to tidy up.
            assert [name for name in strange_files(self.path) if not name.endswith(".corrupt")] == []
        finally:
            self.patches.undo()
            shutil.rmtree(self.folder)


SETTINGS = hypothesis.settings(
    max_examples=3000 if SOAK else 15,
    stateful_step_count=60 if SOAK else 25,
    deadline=None,
    derandomize=not SOAK,  # `make soak` looks for what nobody has seen yet
    report_multiple_bugs=False,
)


def test_directory():
    run_state_machine_as_test(Directory, settings=SETTINGS)
