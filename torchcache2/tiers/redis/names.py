"""The names under which rows and claims lie on a server."""

from __future__ import annotations

from torchcache2.core.keys import Keys

_ROWS = b"torchcache2:"
_CLAIMS = b"torchcache2:claim:"  # no row has such a name, as its next part would be 32 hexadecimal digits


def row_names(keys: Keys) -> list[bytes]:
    """The name of each key's row."""
    return _names(_ROWS, keys)


def claim_names(keys: Keys) -> list[bytes]:
    """The name of each key's claim, which lies on the server of the row."""
    return _names(_CLAIMS, keys)


def pattern(namespace: bytes) -> bytes:
    """The pattern that SCAN takes for the rows of a namespace; digits need no escape in it."""
    return b"%s%s:*" % (_ROWS, namespace.hex().encode())


def _names(start: bytes, keys: Keys) -> list[bytes]:
    start = b"%s%s:" % (start, keys.namespace.hex().encode())
    data = keys.data.tobytes()
    return [start + data[at : at + 16] for at in range(0, len(data), 16)]
