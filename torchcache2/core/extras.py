"""Libraries that not everybody needs: what is installed with an extra."""

from __future__ import annotations

import importlib
from typing import Any

from torchcache2.core.errors import OptionError

__all__ = ["require"]


def require(library: str, extra: str, wanted: str) -> Any:
    """A library that only some options need.

    Parameters
    ----------
    library : str
        What to import.
    extra : str
        The extra of this package that installs it.
    wanted : str
        The option that needs it, as the user has written it.

    Raises
    ------
    OptionError
        If it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise OptionError(
            f'{wanted} needs a library that is not installed: pip install "torchcache2[{extra}]" ({error})'
        ) from None
