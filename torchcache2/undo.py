"""`Undo`: what a forward has left behind in its module, put back."""

from __future__ import annotations

from typing import Any

import torch

from torchcache2.namespace import NamespaceKeeper, Seen

__all__ = ["Undo"]


class Undo:
    """Small buffers, attributes, and what containers hold, as they are now, to be put back by a call."""

    def __init__(self, keeper: NamespaceKeeper, seen: Seen, root: Any) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in seen.tensors.small_buffers()]
        self._attributes = keeper.attributes(root)

    def __call__(self) -> None:
        """Put back everything."""
        for buffer, content in self._buffers:
            if not torch.equal(buffer, content):
                with torch.inference_mode():  # which buffers may have been made in
                    buffer.copy_(content)
        self._attributes.restore()

    def attributes(self) -> None:
        """Put back attributes of modules alone."""
        self._attributes.restore_fields()
