"""Ranks that find none of each other's rows are told why, if only what their modules keep differs."""

import os
import zlib

import pytest

from tests.helpers.storage import NAMESPACES, put
from tests.helpers.storage import warnings_of as records_of
from torchcache2.tiers.shared import tables as tables_module

SAME = {"weights layer": "w", "class Net": "c", "attribute size": "3"}
OTHERS = NAMESPACES[1]


def warnings_of(log):
    return [record.getMessage() for record in records_of(log)]


@pytest.fixture
def rank(join, monkeypatch):
    """Makes tiers of ranks, each with the parts of a namespace, that have computed for long."""
    monkeypatch.setattr(tables_module, "_COMPARED_AFTER", -1.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    def one(number, parts, budget=10**8, **environment):
        for name, value in ({"RANK": number, "WORLD_SIZE": 4, "MASTER_PORT": 1} | environment).items():
            monkeypatch.setenv(name, str(value))
        values = {name: str(value) for name, value in parts.items() if len(value) < 20}
        parts = {name: value.encode().hex() for name, value in parts.items()}
        return join(budget, description=lambda namespace: {"class": "Net", "parts": parts, "values": values})

    return one


def test_one_warning_names_what_differs(rank, log):
    ranks = [rank(number, SAME | {"attribute device": f"cuda:{number}"}) for number in range(3)]
    for number, tier in enumerate(ranks):
        put(tier, range(3), namespace=NAMESPACES[number])
        put(tier, range(3, 6), namespace=NAMESPACES[number])
    (warning,) = warnings_of(log)
    assert warning.startswith("Net: rank 0 and rank 1 find none of each other's rows")
    assert ": attribute device: cuda:0 → cuda:1. Use the device of the input" in warning


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"attribute cfg": "long" * 10}, {"attribute cfg": "longer" * 10}, "attribute cfg changed"),
        (
            {"global RANK of function f": "0"},
            {"global RANK of function f": "1"},
            "global RANK of function f: ",
        ),
        # An object that only the first rank has brings its code along.
        ({"attribute log": "object", "class Log": "c"}, {"attribute log": "None"}, "log: object → None"),
        ({"attribute log": "object", "class Log": "c"}, {}, "attribute log is gone: object"),
    ],
)
def test_what_modules_keep_is_named(rank, log, first, second, text):
    put(rank(0, SAME | first), range(3))
    put(rank(1, SAME | second), range(3), namespace=OTHERS)
    (warning,) = warnings_of(log)
    assert text in warning


@pytest.mark.parametrize(
    "parts",
    [
        {"weights layer": "other"},  # such as another stage of a pipeline
        {"weights layer": "other", "attribute stage": "1"},
        {"class Net": "other", "attribute stage": "1"},
        {"class Stage": "more", "child 0": "more", "attribute stage": "1"},
        {"format": "other"},
    ],
)
def test_other_weights_and_other_code_are_meant(rank, log, parts):
    put(rank(0, SAME | {"attribute stage": "0"}), range(3))
    put(rank(1, SAME | {"attribute stage": "0"} | parts), range(3), namespace=OTHERS)
    assert warnings_of(log) == []


def test_different_code_on_both_sides_is_meant(rank, log):
    put(rank(0, SAME | {"attribute stage": "f", "function f": "f"}), range(3))
    put(rank(1, SAME | {"attribute stage": "g", "function g": "g"}), range(3), namespace=OTHERS)
    assert warnings_of(log) == []


def test_ranks_that_have_met_are_not_compared(rank, log):
    first, second, third = [rank(number, SAME | {"attribute layer": str(number)}) for number in range(3)]
    put(first, range(3))
    put(second, range(3))  # it has had both instances, whichever came first
    put(second, range(3), namespace=OTHERS)
    put(first, range(3, 6))
    put(third, range(3), namespace=OTHERS)
    put(first, range(6, 9))
    assert warnings_of(log) == []


def test_ranks_that_share_some_rows_may_differ_elsewhere(rank, log):
    for number, own in enumerate(NAMESPACES[1:]):  # such as an evaluation that each rank does a part of
        tier = rank(number, SAME | {"attribute part": str(number)})
        put(tier, range(3))
        put(tier, range(3), namespace=own)
    assert warnings_of(log) == []


@pytest.mark.parametrize(
    "other", [{"MASTER_PORT": 2}, {"RANK": 0, "WORLD_SIZE": 1}, {"TORCHELASTIC_RUN_ID": "another run"}]
)
def test_runs_of_a_sweep_differ_on_purpose(rank, log, other):
    put(rank(0, SAME | {"attribute rate": "0.1"}), range(3))
    put(rank(1, SAME | {"attribute rate": "0.2"}, **other), range(3), namespace=OTHERS)
    assert warnings_of(log) == []


def test_what_ranks_have_in_the_beginning_says_nothing(rank, log, monkeypatch):
    monkeypatch.setattr(tables_module, "_COMPARED_AFTER", 10.0)
    for number in range(2):
        put(rank(number, SAME | {"attribute rank": str(number)}), range(3), namespace=NAMESPACES[number])
    assert warnings_of(log) == []


def test_a_description_that_is_unknown_or_damaged_or_long_is_no_fault(rank, log):
    tiers = [
        rank(0, {}),
        rank(1, {f"attribute {os.urandom(16).hex()}": os.urandom(16).hex() for _ in range(20_000)}),
        rank(2, SAME | {"attribute rank": "2"}),
        rank(3, SAME | {"attribute rank": "3"}),
    ]
    tiers[0]._description = lambda namespace: {}
    for tier, namespace in zip(tiers, [*NAMESPACES, b"fourth namespace"], strict=True):
        put(tier, range(3), namespace=namespace)
        if tier is tiers[2]:
            (table,) = tier._tables.open.values()
            os.pwrite(table.region.descriptor, zlib.compress(b"no JSON"), table.space._starts["about"])
    assert warnings_of(log) == []
    assert [tier.stats().faults for tier in tiers] == [0] * 4


def test_a_full_memory_is_no_reason_to_be_silent(rank, log, monkeypatch):
    monkeypatch.setattr(tables_module, "_COMPARED_AFTER", 10.0)
    tiers = [rank(number, SAME | {"attribute rank": str(number)}, budget=600_000) for number in range(2)]
    for names in (range(1), range(200)):
        for number, tier in enumerate(tiers):
            put(tier, names, 1000, namespace=NAMESPACES[number])
    assert ["is full" in text for text in warnings_of(log)] == [True, True]
    monkeypatch.setattr(tables_module, "_COMPARED_AFTER", -1.0)
    for number, tier in enumerate(tiers):
        put(tier, range(200, 201), 1000, namespace=NAMESPACES[number])
    assert "attribute rank: 0 → 1" in warnings_of(log)[2]
