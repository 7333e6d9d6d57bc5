"""`Undo`: what a forward has left behind in its module, put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchcache2.core.gather import as_bytes
from torchcache2.identity.namespace import NamespaceKeeper, Seen

__all__ = ["Undo"]


class Undo:
    """Small buffers, attributes, what containers hold, and grad mode, as they are now; to be put back."""

    def __init__(self, keeper: NamespaceKeeper, seen: Seen, root: Any) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in seen.tensors.small_buffers()]
        self._attributes = keeper.attributes(root)
        self._grad = torch.is_grad_enabled()

    def __call__(self) -> None:
        """Put back everything."""
        for buffer, content in self._buffers:
            if not _is_same(buffer, content):
                with torch.inference_mode():  # buffers that were made in it can be written to in it only
                    buffer.copy_(content)
        self._attributes.restore()
        torch.set_grad_enabled(self._grad)

    def attributes(self) -> None:
        """Put back what is this thread's own, or in the way: attributes of modules, and grad mode."""
        self._attributes.restore_fields()
        torch.set_grad_enabled(self._grad)


def _is_same(buffer: Tensor, content: Tensor) -> bool:
    try:
        return torch.equal(as_bytes(buffer[None]), as_bytes(content[None]))
    except (NotImplementedError, RuntimeError):  # the buffer is sparse, or has no data
        return True
