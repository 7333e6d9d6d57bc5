"""`check_names`: an option that does not exist is an error, which says what may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from torchcache2.core.errors import OptionError

__all__ = ["check_names"]

_OF_TORCHCACHE = {  # options of torchcache 0.6 that do not exist here
    "zstd_compression": "it is compression='brotli'",
    "zstd_compression_level": "it is compression_quality",
    "zstd_compression_threads": "nothing takes its place, as one thread compresses behind the caller's back",
    "use_mmap_on_load": "nothing takes its place, as files are read and never mapped",
}


def check_names(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise `OptionError` for the first of the `given` names that is not `known`."""
    for name in given:
        if name in _OF_TORCHCACHE:
            raise OptionError(f"{name} is an option of torchcache 0.6; here {_OF_TORCHCACHE[name]}")
        if name not in known:
            close = [option for option in known if len(name) > 1 and name.lower() in option]
            if not 1 <= len(close) <= 2:
                # Names that are less alike are not offered, as hardly anybody can have meant them.
                close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.65)
            meant = f": did you mean {' or '.join(close)}? The" if close else "; the"
            raise OptionError(f"unknown option {name!r}{meant} options are {', '.join(known)}")
