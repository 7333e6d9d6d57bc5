import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchcache2.core.keys import int_key, int_keys
from torchcache2.tiers.index import KeyIndex

TAG = 0x7FFFFFFF << 32  # the bits of a key's second word that its slot holds


class Table:
    """An index with an owner's array beside it, as arenas have."""

    def __init__(self, capacity=4):
        self.index = KeyIndex(np.zeros((capacity, 2), np.uint64))
        self.values = []

    def add(self, keys, values):
        count = len(self.index) + len(keys)
        if count > len(self.index.keys):
            longer = np.zeros((2 * count, 2), np.uint64)
            longer[: len(self.index)] = self.index.keys[: len(self.index)]
            self.index.keys = longer
        self.index.add(words(keys))
        self.values += values

    def remove(self, keys):
        source, target = self.index.remove(self.index.find(words(keys)))
        for old, new in zip(source, target, strict=True):
            self.values[new] = self.values[old]
        del self.values[len(self.index) :]

    def find(self, keys):
        entries = self.index.find(words(keys))
        assert entries.shape == (len(keys),)
        return [None if entry < 0 else self.values[entry] for entry in entries]


def words(keys):
    return np.array(list(keys), np.uint64).reshape(-1, 2)


def random_words(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), np.uint64, endpoint=False)


# Keys that are as alike as keys can be: five home slots for tables of every size, four tags.
HOMES = [low + (high << 40) for low in (0, 1, 7, 15, 2**20 - 1) for high in (0, 1, 2)]
TAGS = [tag + rest for tag in (0, 1 << 32, 5 << 32, TAG) for rest in (0, 1, 2**63)]
KEYS = [(home, tag) for home in HOMES for tag in TAGS]
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.sets(st.sampled_from(KEYS), max_size=60)))


@given(STEPS)
@example([("add", set(KEYS)), ("remove", set(KEYS)), ("add", set(KEYS))])
@example([("add", set(KEYS[:12])), ("remove", set(KEYS[:11])), ("add", set(KEYS[1:12]))])
def test_an_index_agrees_with_a_dict(steps):
    table, model = Table(), {}
    for step, (name, keys) in enumerate(steps):
        if name == "add":
            new = {key: (step, key) for key in keys if key not in model}
            table.add(list(new), list(new.values()))
            model |= new
        else:
            gone = [key for key in keys if key in model]
            table.remove(gone)
            for key in gone:
                del model[key]
        assert len(table.index) == len(table.values) == len(model)
        assert table.find(KEYS) == [model.get(key) for key in KEYS]
        assert sorted(map(tuple, table.index.keys[: len(model)].tolist())) == sorted(model)
        assert table.index.room >= 0


@pytest.mark.parametrize("size", [0, 1, 9])
def test_an_empty_index_finds_nothing(size):
    index = KeyIndex(np.zeros((0, 2), np.uint64))
    found = index.find(random_words(size))
    assert found.tolist() == [-1] * size
    assert found.dtype == np.int64
    assert len(index) == 0


def test_a_key_that_is_asked_for_twice_is_found_twice_and_strides_do_not_matter():
    index = KeyIndex(np.zeros((8, 2), np.uint64))
    keys = random_words(8)
    index.add(keys)
    assert index.find(keys[[3, 3, 0, 3]]).tolist() == [3, 3, 0, 3]
    assert index.find(keys[::-2]).tolist() == [7, 5, 3, 1]
    assert index.find(np.asfortranarray(keys)).tolist() == list(range(8))


@pytest.mark.parametrize("tag_bits", [0, 32], ids=["equal tags", "differing tags"])
def test_keys_that_all_have_one_home_slot(tag_bits):
    count = 600
    keys = np.zeros((count + 50, 2), np.uint64)
    keys[:, 0] = np.arange(len(keys), dtype=np.uint64) << np.uint64(32)
    keys[:, 0] += np.uint64(13)
    keys[:, 1] = np.arange(len(keys), dtype=np.uint64) << np.uint64(tag_bits)
    index = KeyIndex(np.zeros((count, 2), np.uint64))
    index.add(keys[:count])
    assert index.find(keys).tolist() == [*range(count), *[-1] * 50]
    index.remove(np.arange(0, count, 2))
    assert (index.find(keys[:count:2]) == -1).all()
    assert sorted(index.find(keys[1:count:2]).tolist()) == list(range(count // 2))


def test_the_first_entry_is_found_behind_slots_that_were_all_given_up():
    index = KeyIndex(np.zeros((20, 2), np.uint64))
    keys = words((0, number << 32) for number in range(17))
    index.add(keys[1:])
    index.add(keys[:1])  # 16 slots behind its home
    index.remove(np.arange(16))
    assert index.find(keys).tolist() == [0, *[-1] * 16]


def test_a_table_grows_when_and_as_it_said():
    keys = random_words(5000)
    index = KeyIndex(np.zeros_like(keys))
    for _ in range(8):
        room, before = index.room, index.nbytes
        assert index.growth(room) == 0
        index.add(keys[len(index) : len(index) + room])
        assert index.nbytes == before
        assert index.room == 0
        told = index.growth(1)
        index.add(keys[len(index) : len(index) + 1])
        assert index.nbytes == told == 2 * before
    assert (index.find(keys[: len(index)]) == np.arange(len(index))).all()


@pytest.mark.parametrize("count", range(1, 13))
def test_an_absent_key_is_given_up_on_however_many_slots_were_used(count):
    index = KeyIndex(np.zeros((12, 2), np.uint64))
    absent = words((home, 1) for home in range(16))
    for start in range(0, 50 * count, count):  # every slot in turn, until a probe would meet no free one
        index.add(words((home % 16, 0) for home in range(start, start + count)))
        assert (index.find(absent) == -1).all()
        index.remove(np.arange(count))
        assert (index.find(absent) == -1).all()


@pytest.mark.slow
def test_a_million_keys_in_batches_that_grow():
    count = 1_000_000
    keys, others = random_words(count), random_words(100_000, seed=1)
    index = KeyIndex(np.zeros_like(keys))
    start, size = 0, 100
    while start < count:
        index.add(keys[start : start + size])
        start, size = start + size, 2 * size
    assert len(index) == count
    assert (index.find(keys) == np.arange(count)).all()
    assert (index.find(others) == -1).all()
    # With 16 bytes of key and 8 of last use this leaves a row well below 64 bytes.
    assert index.nbytes <= 24 * count

    shuffled = np.random.default_rng(2).permutation(count)
    index.remove(shuffled[: count // 2])
    assert len(index) == count // 2
    assert (index.find(keys[shuffled[: count // 2]]) == -1).all()
    entries = index.find(keys[shuffled[count // 2 :]])
    assert (np.sort(entries) == np.arange(count // 2)).all()
    assert (index.keys[entries] == keys[shuffled[count // 2 :]]).all()


def test_the_key_of_one_int_is_the_one_that_a_batch_has():
    numbers = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200).tolist()
    numbers += [0, 1, 255, 2**31, 2**32, 2**53, 2**63 - 1, -1, -(2**63)]
    words = int_keys(bytes(16), np.array(numbers, np.int64)).words
    assert [int_key(number) for number in numbers] == list(map(tuple, words.tolist()))
