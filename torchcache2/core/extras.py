"""`require`: a library that only some options need."""

from __future__ import annotations

import sys
from typing import Any

from torchcache2.core.errors import OptionError

__all__ = ["require"]


def require(library: str, extra: str, wanted: str) -> Any:
    """Import a library that only some options need; an `OptionError` says how to install it.

    `extra` is the extra of this package that installs it, and `wanted` the option as the user has written it.
    """
    try:
        __import__(library)  # unlike `importlib`, it takes no lock if the library is imported already
        return sys.modules[library]
    except ImportError as error:
        raise OptionError(
            f'{wanted} needs a library that is not installed: pip install "torchcache2[{extra}]" ({error})'
        ) from None
