"""Names of options that do not exist: which one is meant, and what takes the place of another library's."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch
from torch import nn

from torchcache2 import CacheSettings, OptionError, torchcache

OPTIONS = [field.name for field in dataclasses.fields(CacheSettings)]


def of_a_module(**options):
    @torchcache
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in options.items():
                setattr(self, f"torchcache_{name}", value)

        def forward(self, x):
            return x + 1

    Part()(torch.ones(2, 2))


def of_a_class(**options):
    names = {f"torchcache_{name}": value for name, value in options.items()}
    module = type("Part", (nn.Identity,), names)()
    torchcache(module)(torch.ones(2, 2))


WAYS = {
    "decorator": torchcache,
    "settings": CacheSettings,
    "replaced": lambda **options: CacheSettings().replace(options),
    "dataclass": lambda **options: dataclasses.replace(CacheSettings(), **options),
    "attribute": of_a_module,
    "class": of_a_class,
}


def message(way, **options):
    with pytest.raises(OptionError) as caught:
        WAYS[way](**options)
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_is_nearly_right_is_told_the_right_one(way):
    assert message(way, max_memory=5) == (
        "unknown option 'max_memory': did you mean max_memory_cache_size? "
        f"The options are {', '.join(OPTIONS)}"
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("polici", "policy"),
        ("Enabled", "enabled"),
        ("PERSISTENT", "persistent"),
        ("cache_dir", "persistent_cache_dir"),
        ("memory_cache_size", "max_memory_cache_size"),
        ("shared_arg", "shared_args"),
        ("dtype", "cache_dtype"),
        ("quality", "compression_quality"),
        ("cache_size", "max_memory_cache_size or max_persistent_cache_size"),
        ("x", None),
        ("ttl", None),
        ("", None),
    ],
)
def test_only_what_is_near_is_proposed(name, meant):
    text = message("decorator", **{name: 1})
    assert text.startswith(f"unknown option {name!r}")
    assert (f"did you mean {meant}?" in text) if meant else ("did you mean" not in text)
    assert text.lower().endswith(f"the options are {', '.join(OPTIONS)}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("zstd_compression", "it is compression='brotli'"),
        ("zstd_compression_level", "it is compression_quality"),
        ("zstd_compression_threads", "nothing takes its place"),
        ("use_mmap_on_load", "nothing takes its place"),
    ],
)
def test_options_of_torchcache_are_errors_that_name_ours(way, name, here):
    assert message(way, **{name: True}).startswith(f"{name} is an option of torchcache 0.6; here {here}")


def test_every_option_of_torchcache_is_one_of_ours_or_explained():
    peer = pytest.importorskip("torchcache")
    for name in inspect.signature(peer.torchcache).parameters:
        assert name in OPTIONS or "torchcache 0.6" in message("settings", **{name: True})


def test_settings_are_still_an_ordinary_dataclass():
    settings = CacheSettings(False, 5, policy="lru")
    assert (settings.enabled, settings.subsample_count, settings.policy) == (False, 5, "lru")
    assert list(inspect.signature(CacheSettings).parameters) == OPTIONS
    assert pickle.loads(pickle.dumps(settings)) == copy.deepcopy(settings) == settings
    with pytest.raises(TypeError):
        CacheSettings(*range(100))
