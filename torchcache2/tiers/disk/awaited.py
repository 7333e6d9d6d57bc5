"""`AwaitedUploads`: a writer waits until the bucket has more of a folder, so that this may be deleted."""

from __future__ import annotations

import os
import time

from torchcache2.files.directory import MIRROR, CacheDirectory
from torchcache2.files.layout import HEAD


class AwaitedUploads:
    """The segments of a folder that the bucket lacks, as it was when this was made.

    Attributes
    ----------
    patience : float
        Seconds to wait for one of them.
    silence : float
        Seconds after which nobody uploads any more, if the mirror did not touch its file.
    pause : float
        Seconds between two looks.
    """

    patience, silence, pause = 120.0, 10.0, 0.05

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self._lacking = self._look()
        self._had_all = False

    def one_more(self) -> bool:
        """Wait until the bucket has one more of them, or all; False if nobody uploads any more."""
        begun = heard = time.monotonic()
        beat = self._beat()
        while True:
            before = time.monotonic()
            lacking = self._look()
            gone, self._lacking = self._lacking - lacking, lacking
            # What another process wrote after `_look` may have been uploaded already: so when the bucket has
            # all, the caller tries once more to make room, but only once.
            had_all, self._had_all = self._had_all, not lacking
            if gone or not lacking:
                return bool(gone) or not had_all
            now = time.monotonic()
            if beat != (beat := self._beat()):
                heard = now
            if now - heard > self.silence or now - begun > self.patience:
                return False
            time.sleep(max(self.pause, 5 * (now - before)))  # to look takes long if there are many files

    def _look(self) -> set[tuple[str, str]]:
        """Namespaces and names of the segments that have no head."""
        lacking: set[tuple[str, str]] = set()
        for contents in self._directory.scan():
            heads = {info.name for info in contents.heads}
            some = [info.name for info in contents.segments if info.name + HEAD not in heads]
            lacking.update((contents.namespace, name) for name in some)
        return lacking

    def _beat(self) -> int:
        """When the mirror has said last that it uploads."""
        try:
            return self._directory.fs.changed(os.path.join(self._directory.path, MIRROR))
        except OSError:
            return 0
