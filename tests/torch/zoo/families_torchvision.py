"""Families of torchvision: of each of its files with models, the smallest."""

import collections
import functools

import torch
import torchvision

from tests.torch.zoo.checks import Entry
from tests.torch.zoo.families import Family, SkippedError, check_size, size

_SIDES = {"inception": 96, "maxvit": 224, "raft": 128}


def families() -> list[Family]:
    """One of each file."""
    files = collections.defaultdict(list)
    for name in torchvision.models.list_models():
        module = torchvision.models.get_model_builder(name).__module__
        files[module.removeprefix("torchvision.models.")].append(name)
    return [
        Family("torchvision", file, functools.partial(_entry, file, names)) for file, names in files.items()
    ]


def _entry(file: str, names: list[str]) -> Entry:
    side = _SIDES.get(file.rpartition(".")[2], 64)
    options: dict[str, object] = {}
    if "detection" in file:
        raise SkippedError("takes lists of images of several sizes: see test_usages.py")
    if "segmentation" in file or "inception" in file or "googlenet" in file:
        options["weights"] = None
    if "inception" in file or "googlenet" in file:
        options |= {"init_weights": False}
    if "segmentation" in file:
        options |= {"weights_backbone": None}
    builders = [functools.partial(torchvision.models.get_model, name, **options) for name in names]
    if "regnet" in file:  # without memory it cannot be made, so not measured
        build = functools.partial(torchvision.models.get_model, "regnet_y_400mf")
    else:
        build = min(builders, key=size)
        check_size(build)
    if "optical_flow" in file:
        return Entry(build, functools.partial(_pairs, 128))
    if "video" in file:
        clip = (3, 16, 224, 224) if file.endswith(("mvit", "s3d")) else (3, 4, 32, 32)
        return Entry(build, functools.partial(_of_shape, clip))
    name = "input" if "lraspp" in file else "x"
    return Entry(build, functools.partial(_of_shape, (3, side, side), name=name))


def _of_shape(shape: tuple[int, ...], count: int, name: str = "x") -> dict[str, torch.Tensor]:
    return {name: torch.randn(count, *shape)}


def _pairs(side: int, count: int) -> dict[str, torch.Tensor]:
    return {f"image{number}": torch.rand(count, 3, side, side) * 2 - 1 for number in (1, 2)}
