"""The errors of reading and writing a cache directory.

They never reach a training loop: tiers count them as misses, and the commands of ``torchcache2`` report them.
"""

from __future__ import annotations


class UnreadableError(Exception):
    """A segment or directory that this process cannot read."""


class DamagedError(UnreadableError):
    """Bytes that no version of this library has written: a file, a block, a header or its JSON."""


class NewerFormatError(UnreadableError):
    """A segment or a directory of another version of the format, mostly a later one."""


class AwayError(OSError):
    """Bytes in a bucket that fails now; the user has been warned."""


class TooLargeError(UnreadableError):
    """A segment with rows of more bytes than the reader allows."""


class UnknownClassError(UnreadableError):
    """A class, dtype or device that is unknown in this process, or a class whose fields have changed.

    Attributes
    ----------
    name : str
        What is unknown; a class as ``module:qualname``.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name!r} {reason}")
        self.name = name


class UnserialisableError(Exception):
    """A schema without a JSON form; the message names the type at fault, and its place."""
