"""Which files in a cache directory are the cache's own, and what ``CACHEDIR.TAG`` says."""

from __future__ import annotations

import dataclasses
import re

from torchcache2.files.encode import SEGMENT, TEMPORARY
from torchcache2.files.errors import NewerFormatError
from torchcache2.files.filesystem import FileInfo
from torchcache2.files.layout import FORMAT_VERSION

TAG = "CACHEDIR.TAG"
LOCK = ".lock"
MIRROR = ".mirror"
ASKED = ".asked"
FINGERPRINT = "fingerprint.json"
CORRUPT = ".corrupt"
NOTE = ".note"
HEAD = ".head"  # behind the name of a segment that a bucket has
PART, MAP = ".part", ".part.map"  # of such a segment: blocks of it, and which are here
TAG_TEXT = f"""Signature: 8a477f597d28d172789f06886806bc55
# This folder is a cache of torchcache2, format {FORMAT_VERSION}. Deleting it loses nothing but time.
# For cache directory tags, see https://bford.info/cachedir/
"""
_IS_OURS = re.compile(rb"^# This folder is a cache of torchcache2, format (\d+)", re.MULTILINE)
_MOST_DIGITS = 9
NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")
SEGMENT_NAME = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}" + re.escape(SEGMENT))
HEAD_NAME = re.compile(SEGMENT_NAME.pattern + re.escape(HEAD))
PART_NAME = re.compile(SEGMENT_NAME.pattern + re.escape(PART) + r"(\.map)?")
NOTE_NAME = re.compile(NAMESPACE_NAME.pattern + re.escape(NOTE))
_WHOLE_TEXT = f"({re.escape(FINGERPRINT)}|{re.escape(TAG)}|{NOTE_NAME.pattern})"
_TEMPORARY_TEXT = re.compile(_WHOLE_TEXT + r"\.[0-9A-Z]{26}")
_LEFT_OVER = re.compile(f"{SEGMENT_NAME.pattern}({re.escape(TEMPORARY)}|{re.escape(CORRUPT)})")


@dataclasses.dataclass(frozen=True)
class Contents:
    """The files of one namespace, which is 32 hexadecimal digits.

    Besides segments there are the `heads` of those that a bucket has, the `parts` of some of these, segments
    that were found `corrupt`, `temporary` files that are being written, and `others`: ``fingerprint.json``.
    """

    namespace: str
    segments: list[FileInfo]
    heads: list[FileInfo]
    parts: list[FileInfo]
    corrupt: list[FileInfo]
    temporary: list[FileInfo]
    others: list[FileInfo]

    @property
    def files(self) -> list[FileInfo]:
        """All of these files."""
        return [*self.segments, *self.heads, *self.parts, *self.corrupt, *self.temporary, *self.others]

    @property
    def nbytes(self) -> int:
        """Bytes of all of these files."""
        return sum(info.size for info in self.files)

    @property
    def last_used(self) -> float:
        """When a segment was last read or written, in seconds since the epoch; 0.0 if there is none."""
        return max((info.mtime for info in self.segments), default=0.0)


def contents_of(namespace: str, listing: list[FileInfo]) -> Contents:
    """The files of a namespace among what is in its folder."""
    found = Contents(namespace, [], [], [], [], [], [])
    for info in listing:
        if info.is_folder:
            continue
        if SEGMENT_NAME.fullmatch(info.name):
            found.segments.append(info)
        elif HEAD_NAME.fullmatch(info.name):
            found.heads.append(info)
        elif PART_NAME.fullmatch(info.name):
            found.parts.append(info)
        elif info.name == FINGERPRINT:
            found.others.append(info)
        elif is_left_over(info.name):
            (found.corrupt if info.name.endswith(CORRUPT) else found.temporary).append(info)
    return found


def is_ours(info: FileInfo) -> bool:
    """Whether something in the directory is the cache's own."""
    if info.is_folder:
        return NAMESPACE_NAME.fullmatch(info.name) is not None
    is_known = info.name in (TAG, LOCK, MIRROR, ASKED) or NOTE_NAME.fullmatch(info.name) is not None
    return is_known or _TEMPORARY_TEXT.fullmatch(info.name) is not None


def is_left_over(name: str) -> bool:
    """Whether a file of this name was set aside, or is being written, or was left by a dead writer."""
    return bool(_LEFT_OVER.fullmatch(name) or _TEMPORARY_TEXT.fullmatch(name))


def stated_format(tag: bytes) -> int | None:
    """The format that a ``CACHEDIR.TAG`` states; None if it is another program's."""
    match = _IS_OURS.search(tag)
    # Python refuses numbers with thousands of digits; the first digits show that a format is not known.
    return int(match[1][:_MOST_DIGITS]) if match else None


def check_format(place: str, number: int) -> None:
    """Raise `NewerFormatError` if this version does not know the format that a place states."""
    if not 1 <= number <= FORMAT_VERSION:
        raise NewerFormatError(
            f"{place} has format {number}, and this version of torchcache2 knows format {FORMAT_VERSION}: "
            "nothing is read or written there. Upgrade torchcache2, or give another folder"
        )
