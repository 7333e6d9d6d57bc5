"""What to say of an option that does not exist: which one is meant, or what takes its place here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torchcache2.core.errors import OptionError

__all__ = ["check_names"]

# Options of torchcache 0.6 that do not exist here.
_OF_TORCHCACHE = {
    "zstd_compression": "it is compression='brotli'",
    "zstd_compression_level": "it is compression_quality",
    "zstd_compression_threads": "nothing takes its place, as one thread compresses behind the caller's back",
    "use_mmap_on_load": "nothing takes its place, as files are read and never mapped",
}


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise an `OptionError` for the first name that is not the name of an option."""
    options = list(known)
    for name in given:
        if name in _OF_TORCHCACHE:
            raise OptionError(f"{name} is an option of torchcache 0.6; here {_OF_TORCHCACHE[name]}")
        if name not in options:
            close = [option for option in options if len(name) > 1 and name.lower() in option]
            if not 1 <= len(close) <= 2:
                close = difflib.get_close_matches(name.lower(), options, n=1)
            meant = f": did you mean {' or '.join(close)}? The" if close else "; the"
            raise OptionError(f"unknown option {name!r}{meant} options are {', '.join(options)}")
