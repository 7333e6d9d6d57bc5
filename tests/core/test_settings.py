import dataclasses
import os
import shutil
import sys

import numpy as np
import pytest
import torch

from torchcache2 import CacheSettings, OptionError
from torchcache2.core.settings import disabled_by_environment
from torchcache2.core.sizes import host_memory, parse_size

SIZES = [
    *((size, size) for size in (0, 1000, 4_000_000_000, 1 << 50)),
    *(("0", 0), ("1234", 1234), ("123B", 123), ("123 b", 123)),
    *((text, 4_000) for text in ("4K", "4KB", "4kB", "4kb")),
    *((text, 4_096) for text in ("4KiB", "4kib")),
    *((text, 5_000_000) for text in ("5M", "5MB", "5mb")),
    *((text, 4_000_000_000) for text in ("4G", "4GB", "4gb", "4 GB", " 4GB ", "\t4  GB\n")),
    *((text, 2_000_000_000_000) for text in ("2T", "2TB")),
    *(("5MiB", 5 << 20), ("4GiB", 4 << 30), ("2TiB", 2 << 40), ("007MB", 7_000_000)),
    *(("1.5GB", 1_500_000_000), ("1.GB", 1_000_000_000), (".5GB", 500_000_000), ("0.25KiB", 256)),
    *(("1.1GiB", 1_181_116_006), ("0.3 MiB", 314_572)),  # and a part of a byte
    *(("9007199254740993", 2**53 + 1), ("1" + 400 * "0", 10**400)),
]

NO_SIZES = [
    *(-1, -0.5, 0.0, 1.0000001, 2.0, 4e9, float("nan"), float("inf"), True, False, None, b"4GB", [4], 4j),
    *("", " ", "GB", ".", ".GB", "-4GB", "+4GB", "4XB", "4GBB", "4 G B", "4iB", "4B4", "4PB", "1e9"),
    *("4,000", "4_000", "0x10", "50%", "inf", "nan"),
    # A share is a float: a text would otherwise be a budget of no bytes at all.
    *("0.5", "1.5 B"),
]

# Option, values that it cannot take, and what its message says it takes.
WRONG = [
    ("enabled", [None, 0, 1, "yes"], "expected True or False"),
    ("subsample_count", [0, 1, -5, True, 2.0, "10", (10,)], "None or an int of at least 2"),
    ("persistent_module_hash", ["", 5, b"name", True], "None or a non-empty str"),
    ("version", [1.0, b"1", True], "None, a text or an int"),
    ("code_version", [1.0, b"1", True], "None, a text or an int"),
    ("max_memory_cache_size", NO_SIZES, "bytes as an int, a text like '4GB'"),
    ("max_persistent_cache_size", NO_SIZES, "bytes as an int, a text like '4GB'"),
    ("persistent", [0, 1, "", "yes", "/tmp"], "expected True or False"),
    ("persistent_cache_dir", ["", 5, b"/tmp", True], "path of a"),
    ("compression", [None, "", "zstd", "Brotli", True, b"none", ["none"]], "'brotli', 'blosc2' or 'none'"),
    ("compression_quality", [None, -1, 12, True, 1.0, "1"], "an int from 0 to 11"),
    (
        "memory_cache_device",
        ["gpu", "", "cpu:x", 1.5, [], "meta", "cuda:99"],
        "None, or a device of this machine that holds data",
    ),
    (
        "cache_dtype",
        [torch.int8, torch.bool, torch.complex64, "float16", float, np.float32],
        "None or a floating-point torch.dtype",
    ),
    ("policy", [None, "", "fifo", "MRU", b"keep", 0, ["keep"]], "'keep' or 'lru'"),
    ("shared_args", [None, b"mask", 5, [5], ("mask", None)], "the name of an argument, or several"),
    ("item_args", [None, b"texts", 5, [5], ("texts", None)], "the name of an argument, or several"),
    (
        "ignore",
        [None, 3, "", b"a", ("a", None), ("a", "")],
        "the path of an attribute or weight or the name of an argument, or several",
    ),
    ("probe", [None, 1, "yes"], "True or False"),
    ("label", [1, b"teacher"], "None or a text"),
    ("strict", [None, 1, "yes"], "True or False"),
    ("miss_batch", [None, "", "padded", "PAD", True, 2], "'exact' or 'pad'"),
    ("claims", [None, 1, "yes"], "True or False"),
    ("local_dir", ["/tmp/rows"], "as only a bucket has this"),  # more of these three in test_buckets
    ("storage_options", [{}, {"key": "me"}], "as only a bucket has this"),
    ("remote_size", [1, "2TB"], "as only a bucket has this"),
    ("distributed", [None, "on", True, 2, ["node"], "collective"], "'auto', 'off' or 'node'; ranks of"),
    ("verify", [None, "0.1", True, -0.1, 1.1, float("nan"), 2, [0.5]], "a share of hits from 0.0 to 1.0"),
]
WRONG_CASES = [(option, value, expected) for option, values, expected in WRONG for value in values]


@pytest.mark.parametrize(("size", "expected"), SIZES, ids=lambda value: repr(value)[:20])
def test_sizes(size, expected):
    assert parse_size("size", size) == min(expected, 2**63 - 1)
    settings = CacheSettings(max_memory_cache_size=size)
    assert settings.memory_budget() == min(expected, host_memory())  # no more than there is
    assert type(settings.memory_budget()) is int


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 1e-6, np.float64(0.5)], ids=repr)
def test_a_float_is_a_share_of_what_is_free(share):
    assert parse_size("size", share, free=1 << 30) == int(share * (1 << 30))
    assert parse_size("size", share, free=0) == 0


@pytest.mark.parametrize("size", [1, 4, 999, "4", "16"])
def test_a_small_number_needs_a_unit(size):
    with pytest.raises(OptionError, match=f"a unit with so small a number, such as '{size}GB', or '{size}B'"):
        CacheSettings(max_memory_cache_size=size)


@pytest.mark.parametrize("device", ["cpu", None])
def test_a_budget_that_is_a_share_is_part_of_the_memory_of_the_machine(device):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    settings = CacheSettings(max_memory_cache_size=0.5, memory_cache_device=device)
    assert 1 << 20 < settings.memory_budget() <= whole // 2
    # Of the memory that is free when it is asked for, not when the option was given.
    assert settings.max_memory_cache_size == 0.5


@pytest.mark.parametrize(("option", "value", "expected"), WRONG_CASES, ids=repr)
def test_a_wrong_value_is_an_error_that_names_option_value_and_what_is_expected(option, value, expected):
    with pytest.raises(OptionError) as caught:
        CacheSettings(**{option: value})
    message = str(caught.value)
    shown = "…" if option == "storage_options" else repr(value)  # there may be a secret in it
    assert message.startswith(f"{option}={shown}: ")
    assert expected in message


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(CacheSettings)])
def test_every_option_is_checked_and_in_the_table_above(option):
    assert option in [name for name, _, _ in WRONG]


def test_every_option_has_its_documented_default():
    assert dataclasses.asdict(CacheSettings()) == {
        "enabled": True,
        "subsample_count": None,
        "persistent": None,
        "persistent_cache_dir": None,
        "persistent_module_hash": None,
        "version": None,
        "code_version": None,
        "label": None,
        "max_memory_cache_size": 1_000_000_000,
        "max_persistent_cache_size": 10_000_000_000,
        "compression": "brotli",
        "compression_quality": 1,
        "memory_cache_device": torch.device("cpu"),
        "cache_dtype": None,
        "policy": "keep",
        "shared_args": (),
        "item_args": (),
        "ignore": (),
        "probe": True,
        "strict": False,
        "miss_batch": "exact",
        "verify": 0.0,
        "distributed": "auto",
        "claims": True,
        "local_dir": None,
        "storage_options": None,
        "remote_size": None,
    }


def test_a_cache_directory_is_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert CacheSettings(persistent_cache_dir="rows").persistent_cache_dir == str(tmp_path / "rows")
    assert CacheSettings(persistent_cache_dir="~/rows").persistent_cache_dir == "/home/somebody/rows"
    assert CacheSettings(persistent_cache_dir=tmp_path).persistent_cache_dir == str(tmp_path)


@pytest.mark.parametrize("missing", ["", "not/there/yet"])
def test_a_share_of_the_disk_is_one_of_what_is_free_where_the_folder_is_or_will_be(tmp_path, missing):
    settings = CacheSettings(max_persistent_cache_size=0.5)
    total = shutil.disk_usage(tmp_path).total
    assert 1 << 20 < settings.persistent_budget(str(tmp_path / missing)) <= total // 2
    assert CacheSettings(max_persistent_cache_size="5MB").persistent_budget("/") == 5_000_000


def test_the_quality_has_the_range_of_its_codec():
    assert CacheSettings(compression="blosc2", compression_quality=9).compression_quality == 9
    with pytest.raises(OptionError, match=r"^compression_quality=10: expected an int from 0 to 9 for 'blo"):
        CacheSettings(compression="blosc2", compression_quality=10)


def test_a_codec_that_is_not_installed_is_an_error_when_it_is_wanted(monkeypatch):
    monkeypatch.setitem(sys.modules, "blosc2", None)
    for options in ({"persistent": True}, {"persistent_cache_dir": "/rows"}):
        with pytest.raises(OptionError, match=r'pip install "torchcache2\[blosc2\]"'):
            CacheSettings(**options, compression="blosc2")
    for options in ({}, {"persistent": False, "persistent_cache_dir": "/rows"}):  # nothing is written
        CacheSettings(**options, compression="blosc2")


@pytest.mark.parametrize("collection", [list, tuple, set, frozenset, dict.fromkeys, iter])
def test_names_of_shared_arguments_come_in_any_collection(collection):
    assert CacheSettings(shared_args=collection(["table", "mask"])).shared_args == ("mask", "table")


def test_equal_settings_are_equal_keys_of_a_dict():
    one = CacheSettings(memory_cache_device="cpu", shared_args=["b", "a"], cache_dtype=torch.float16)
    same = CacheSettings(
        memory_cache_device=torch.device("cpu"), shared_args=("a", "b", "a"), cache_dtype=torch.half
    )
    other = CacheSettings(memory_cache_device=None, shared_args=("a", "b"), cache_dtype=torch.float16)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert len({one, same, other}) == 2


def test_replace_changes_what_it_is_given_and_checks_it():
    settings = CacheSettings(policy="lru")
    changed = settings.replace({"max_memory_cache_size": "1MB"})
    assert (changed.policy, changed.memory_budget()) == ("lru", 1_000_000)
    assert settings.memory_budget() == 1_000_000_000
    assert settings.replace({}) == settings
    with pytest.raises(OptionError, match="subsample_count=0"):
        settings.replace({"subsample_count": 0})


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, True),
        ({"enabled": False, "subsample_count": 5, "cache_dtype": torch.half, "shared_args": ("m",)}, True),
        ({"max_memory_cache_size": "5MB"}, False),
        ({"policy": "lru"}, False),
        ({"memory_cache_device": None}, False),
    ],
    ids=str,
)
def test_one_budget_is_shared_by_settings_that_mean_the_same_memory(options, shares):
    assert CacheSettings().shares_tiers_with(CacheSettings(**options)) is shares


def test_mru_is_another_name_of_keep():
    assert CacheSettings(policy="mru") == CacheSettings() != CacheSettings(policy="lru")
    assert CacheSettings(policy="lru").replace({"policy": "mru"}).policy == "keep"


def test_values_of_the_switch_in_the_environment(monkeypatch):
    monkeypatch.delenv("TORCHCACHE_DISABLE", raising=False)
    assert not disabled_by_environment()
    for value in ("", " ", "0", "false", "No", "1", " 1 ", "true", "YES"):
        monkeypatch.setenv("TORCHCACHE_DISABLE", value)
        assert disabled_by_environment() is (value in ("1", " 1 ", "true", "YES"))
