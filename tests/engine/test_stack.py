"""The stack knows no tier by name: here it has three of a kind that only tests have."""

import shutil

import numpy as np
import pytest

from tests.helpers.storage import NAMESPACES, found, keys_of, rows_of, seal
from torchcache2 import CacheSettings
from torchcache2.engine import stack as stack_module
from torchcache2.engine.stack import TierStack
from torchcache2.tiers.base import Tally, TierClaim
from torchcache2.tiers.make import make_tiers
from torchcache2.tiers.memory.tier import MemoryTier


class Named(MemoryTier):
    """Keeps what is put, and may do something just after it has been asked."""

    def __init__(self, name, *, is_lasting=False):
        super().__init__(10**7)
        self.name, self.is_lasting = name, is_lasting
        self.asked, self.calls = [], []
        self.after_get = lambda: None

    def get(self, keys):
        self.asked.append(len(keys))
        found = super().get(keys)
        self.after_get()
        return found

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")
        super().close()


class Granting(Named):
    """Gives claims of some keys; the others are somebody else's."""

    def __init__(self, granted):
        super().__init__("memory")
        self.granted, self.claimed = keys_of(granted).data.tolist(), []

    def claims(self, keys):
        return GrantingClaim(keys, self)


class GrantingClaim(TierClaim):
    pauses = 0.0, 0.0

    def __init__(self, keys, tier):
        self.keys, self.tier, self.tally = keys, tier, Tally()

    def take(self, positions):
        self.tier.claimed.append(len(positions))
        is_granted = [key in self.tier.granted for key in self.keys.take(positions).data.tolist()]
        return positions[np.array(is_granted)]

    def look(self, positions):
        return np.ones(len(positions), bool), np.zeros(len(positions), bool)

    def release(self):
        pass


class User:
    namespace = NAMESPACES[0]

    def description(self, namespace):
        return {"class": "User"}


@pytest.fixture
def tiers():
    return [Named("memory"), Named("disk"), Named("memory", is_lasting=True)]


@pytest.fixture
def stack(tiers, monkeypatch):
    monkeypatch.setattr(stack_module, "make_tiers", lambda *options: tiers)
    return TierStack(CacheSettings())


def keep(tier, names):
    assert tier.put(keys_of(names), rows_of(names, 4)) == len(names)


def rows_in(tiers):
    return [tier.stats().rows for tier in tiers]


def test_each_tier_is_asked_for_what_the_faster_ones_do_not_have(stack, tiers):
    for tier, names in zip(tiers, ([0, 1], [2, 3, 4], [5]), strict=True):
        keep(tier, names)
    assert found(stack, [5, 2, 9, 0, 3]) == [0, 2, 3, 5]
    assert [tier.asked for tier in tiers] == [[5], [4], [2]]
    assert rows_in(tiers) == [5, 4, 1]  # each has what was found below it
    assert found(stack, [5, 2, 0, 3]) == [0, 2, 3, 5]
    assert [tier.asked for tier in tiers] == [[5, 4], [4], [2]]


def test_a_key_that_is_asked_for_twice_is_offered_once(stack, tiers):
    keep(tiers[2], [7])
    assert found(stack, [7, 7, 7]) == [7, 7, 7]
    assert rows_in(tiers) == [1, 1, 1]


def test_rows_are_put_into_all_and_dropped_from_all(stack, tiers):
    assert stack.put(User(), keys_of([1, 2]), rows_of([1, 2], 4)) == 2
    assert rows_in(tiers) == [2, 2, 2]
    stack.drop(NAMESPACES[0])
    assert rows_in(tiers) == [0, 0, 0]


@pytest.mark.parametrize("where", [1, 2])
@pytest.mark.parametrize("when", ["read", "offered"])
def test_rows_that_are_dropped_meanwhile_do_not_come_back(stack, tiers, where, when, monkeypatch):
    keep_if_room = tiers[0].keep_if_room

    def dropped_and_offered(keys, rows):
        stack.drop(NAMESPACES[0])
        return keep_if_room(keys, rows)

    keep(tiers[where], [1, 2])
    if when == "read":
        tiers[where].after_get = lambda: stack.drop(NAMESPACES[0])
    else:
        monkeypatch.setattr(tiers[0], "keep_if_room", dropped_and_offered)
    found(stack, [1, 2])
    assert rows_in(tiers) == [0, 0, 0]


def test_a_drop_leaves_what_is_read_of_another_namespace(stack, tiers):
    keep(tiers[0], [0])
    keep(tiers[1], [1, 2])
    tiers[1].after_get = lambda: stack.drop(NAMESPACES[1])
    assert found(stack, [0, 1, 2]) == [0, 1, 2]
    assert rows_in(tiers) == [3, 2, 0]


@pytest.mark.parametrize("others", [255, 256, 600])
def test_a_drop_is_noticed_whatever_is_dropped_besides(stack, tiers, others):
    def drop():
        tiers[1].after_get = lambda: None
        stack.drop(NAMESPACES[0])
        for number in range(others):
            stack.drop(number.to_bytes(16, "big"))

    keep(tiers[1], [1, 2])
    tiers[1].after_get = drop
    found(stack, [1, 2])
    assert rows_in(tiers) == [0, 0, 0]


def test_counts_have_the_names_of_their_tiers_and_add_up(stack, tiers):
    keep(tiers[0], [1])
    keep(tiers[1], [1, 2])
    keep(tiers[2], [1, 2, 3])
    counts = stack.stats()
    assert (counts["memory_rows"], counts["disk_rows"], counts["faults"]) == (4, 2, 0)


def test_what_lasts_is_flushed_and_stays_when_a_cache_is_closed(stack, tiers):
    first, second = User(), User()
    stack.join(first)
    stack.join(second)
    stack.forget(NAMESPACES[0])
    assert tiers[0].asked == []
    stack.put(first, keys_of([1]), rows_of([1], 4))
    stack.forget(NAMESPACES[0])
    assert rows_in(tiers) == [0, 0, 1]
    stack.leave(first)
    assert [tier.calls for tier in tiers] == [[], [], ["flush"]]
    stack.leave(second)
    assert [tier.calls for tier in tiers] == [["close"], ["close"], ["flush", "close"]]


def test_what_a_folder_holds_does_not_make_the_budget_of_the_next_run_smaller(tmp_path, monkeypatch):
    """A disk that has nothing else on it."""
    path = tmp_path / "cache"
    total = 50_000_000

    def usage(folder):
        used = sum(file.stat().st_size for file in path.glob("*/*")) if path.exists() else 0
        return shutil._ntuple_diskusage(total, used, total - used)

    def budget(rows):
        disk = make_tiers(settings, set, lambda namespace: {})[1]
        try:
            if rows:
                seal(disk, range(rows), 10_000)
            return disk.budget
        finally:
            disk.close()

    monkeypatch.setattr(shutil, "disk_usage", usage)
    settings = CacheSettings(
        persistent=True, persistent_cache_dir=path, max_persistent_cache_size=0.5, compression="none"
    )
    assert budget(200) == total // 2
    assert usage(path).free < total - 200 * 10_000
    assert budget(0) == total // 2


def test_a_batch_is_claimed_in_each_tier_that_has_claims(stack, tiers):
    tiers[1:] = [Granting(range(6)), Named("disk"), Granting(range(3, 10))]
    claim = stack.claim(keys_of(range(10)))
    assert claim.mine.tolist() == [3, 4, 5] and claim.others.tolist() == [0, 1, 2, 6, 7, 8, 9]
    assert tiers[1].claimed == [10] and tiers[3].claimed == [6]
    claim.release()
    del tiers[3]
    assert stack.claim(keys_of(range(10))).mine.tolist() == list(range(6)) and tiers[1].claimed == [10, 10]


@pytest.mark.parametrize("claims", [True, False])
def test_without_claims_all_is_computed(tiers, monkeypatch, claims):
    monkeypatch.setattr(stack_module, "make_tiers", lambda *options: tiers)
    tiers[:] = [Granting([1]), Granting([1])]
    claim = TierStack(CacheSettings(claims=claims)).claim(keys_of(range(3)))
    assert claim.mine.tolist() == ([1] if claims else [0, 1, 2])
    assert tiers[0].claimed == [3] * claims
