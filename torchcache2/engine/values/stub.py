"""Until `rebuilder` lands."""

from __future__ import annotations

import torch

from torchcache2.core.rows import Rows
from torchcache2.engine.values.samples import from_rows


def rebuilder(schema):
    """A sample of the buffers of a row."""

    def make(buffers):
        columns = []
        for leaf, data in zip(schema.leaves, buffers, strict=True):
            raw = torch.tensor(list(bytes(data)), dtype=torch.uint8)
            columns.append(raw.view(leaf.stored).view(1, *leaf.stored_shape))
        return from_rows(Rows(schema, columns, 1))[0]

    return make
