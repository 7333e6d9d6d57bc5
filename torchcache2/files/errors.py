"""The errors of reading and writing a cache directory.

None of them reaches a user: the tier counts them as misses, and the commands of ``torchcache2`` report them.
"""

from __future__ import annotations


class UnreadableError(Exception):
    """A segment or directory that this process cannot read."""


class DamagedError(UnreadableError):
    """Bytes that no version of this library has written: a file, a block, a header or its JSON."""


class NewerFormatError(UnreadableError):
    """A segment or a directory of another version of the format, mostly a later one."""


class AwayError(OSError):
    """Bytes of a bucket that fails now, as the user has been warned."""


class TooLargeError(UnreadableError):
    """A segment with rows of more bytes than the reader allows."""


class UnknownClassError(UnreadableError):
    """A class, dtype or device that this process does not know, or a class with other fields by now.

    Attributes
    ----------
    name : str
        What is unknown; a class as ``module:qualname``.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name!r} {reason}")
        self.name = name


class UnserialisableError(Exception):
    """A schema that has no JSON form; the message names the type that has none, and where it is."""
