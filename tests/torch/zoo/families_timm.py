"""Families of timm: of each of its files with models, a small one."""

import collections
import functools

import timm
import torch

from tests.torch.zoo.checks import Entry, Inputs
from tests.torch.zoo.families import Family, SkippedError, check_size, size

_SMALL = [
    "test_",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xxt",
    "xs",
    "tiny",
    "mini",
    "small",
    "0",
    "1",
    "2",
    "18",
]
_MOST_MEASURED = 3
_SIZES = (64, 96, 224)


def families() -> list[Family]:
    """One of each file."""
    files = collections.defaultdict(list)
    for name in timm.list_models():
        files[timm.models.model_entrypoint(name).__module__.rpartition(".")[2]].append(name)
    return [
        Family("timm", file, functools.partial(_entry, sorted(names, key=_hint)))
        for file, names in sorted(files.items())
    ]


def _hint(name: str) -> tuple[int, int, str]:
    parts = name.split("_")
    ranks = [number for number, word in enumerate(_SMALL) if word in parts or name.startswith(word)]
    return min(ranks, default=len(_SMALL)), len(name), name


def _entry(names: list[str]) -> Entry:
    measured = {}
    for name in names[:_MOST_MEASURED]:
        measured[name] = size(functools.partial(timm.create_model, name, pretrained=False))
    name = min(measured, key=measured.__getitem__)
    plain = functools.partial(timm.create_model, name, pretrained=False, num_classes=10)
    check_size(plain)
    for side in _SIZES:
        for options in ({"img_size": side}, {}):
            build = functools.partial(plain, **options)
            inputs = functools.partial(_images, side)
            if _works(build, inputs):
                return Entry(build, inputs)
    own = plain().default_cfg["input_size"]
    inputs = functools.partial(_images, own[-1])
    if not _works(plain, inputs):
        raise SkippedError(f"{name} takes other inputs than images")
    return Entry(plain, inputs)


def _images(side: int, count: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, 3, side, side)}


def _works(build: functools.partial, inputs: Inputs) -> bool:
    try:
        build().eval()(**inputs(1))
    except TimeoutError:
        raise
    except Exception:
        return False
    return True
