"""Which parts of a namespace seem to be another one on each rank, whose rows the others then never find."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchcache2.core.ranks import Place

__all__ = ["per_rank"]

_KINDS = ("attribute ", "constructor argument ", "global ")
_DEVICE = re.compile(r"'?(?:cuda|xpu|npu|hpu|mlu):(\d+)'?")
_NAME = re.compile(
    r"(?:(?:global|local)_)?(?:rank|process_index)|(?:cuda_)?(?:device|gpu)(?:_?(?:id|index|idx))?"
)


def per_rank(values: Mapping[str, str], where: Place) -> dict[str, str]:
    """The parts that name this rank or its device, with their values, of the parts that have short ones.

    To compare what ranks have, one would have to wait for another. So a value counts that is the number of
    this rank, if it is a device or if its name says that it is a rank. Only the second rank is asked: zero
    is the number of many things, and one warning is enough.
    """
    if where.rank != 1:
        return {}
    numbers = {str(number) for number in (where.rank, where.local_rank) if number > 0}
    found = {}
    for name, text in values.items():
        kind = next((kind for kind in _KINDS if name.startswith(kind)), None)
        if kind is None:
            continue
        variable = name.removeprefix(kind).split()[0].rpartition(".")[2].lower()
        if (device := _DEVICE.fullmatch(text)) is not None:
            is_own = int(device[1]) == where.local_rank > 0
        else:
            is_own = text in numbers and _NAME.fullmatch(variable) is not None
        if is_own:
            found[name] = text
    return found
