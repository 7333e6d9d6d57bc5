"""Families of open_clip: its towers for images and for texts, tiny."""

import functools

import open_clip
import torch
from torch import nn

from tests.torch.zoo.checks import Entry, Inputs
from tests.torch.zoo.families import Family

_TEXT = {"context_length": 8, "vocab_size": 40, "width": 16, "heads": 2, "layers": 2}
_VISION = {
    "transformer": {"image_size": 32, "patch_size": 16, "width": 64, "layers": 2},
    "transformer with pooling": {
        "image_size": 32,
        "patch_size": 16,
        "width": 64,
        "layers": 2,
        "attentional_pool": True,
    },
    "resnet": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 16},
    "timm": {"image_size": 64, "timm_model_name": "resnet10t", "timm_pool": "avg", "timm_proj": "linear"},
}


class Tower(nn.Module):
    """What encodes one kind of items."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """Normalised embeddings."""
        return getattr(self.model, f"encode_{self.kind}")(items, normalize=True)


def families() -> list[Family]:
    """Each tower."""
    found = []
    for name, vision in _VISION.items():
        side = vision["image_size"]
        made = functools.partial(_tower, open_clip.CLIP, vision, "image")
        found.append(_family(name, made, functools.partial(_images, side)))
    vision = _VISION["transformer"]
    found.append(_family("text", functools.partial(_tower, open_clip.CLIP, vision, "text"), _texts))
    custom = functools.partial(_tower, open_clip.CustomTextCLIP, vision, "text")
    return [*found, _family("custom text", custom, _texts)]


def _family(name: str, build: functools.partial, inputs: Inputs) -> Family:
    return Family("open_clip", name, lambda: Entry(build, inputs))


def _tower(kind: type, vision: dict[str, object], items: str) -> nn.Module:
    return Tower(kind(embed_dim=16, vision_cfg=dict(vision), text_cfg=dict(_TEXT)), items)


def _images(side: int, count: int) -> dict[str, torch.Tensor]:
    return {"items": torch.randn(count, 3, side, side)}


def _texts(count: int) -> dict[str, torch.Tensor]:
    return {"items": torch.randint(1, 40, (count, 8))}
