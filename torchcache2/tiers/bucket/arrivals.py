"""`Arrivals`: whether a batch that needs much waits for whole segments to come down, instead of by ranges.

What comes by ranges of a segment that is on its way crosses the network twice, and slows the segment down. So
while segments come, large batches leave most of the time to them: after one that has come by ranges, the next
one waits up to four times as long. Small batches never wait, nor does anybody when nothing comes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from torchcache2.files.directory import MIRROR, CacheDirectory

_SMALL = 1 << 20  # bytes, which come by ranges at once
_TIMES = 4.0  # as long as the ranges of a large batch take, the next one may wait
_LOOK_EVERY = 0.02  # seconds


class Arrivals:
    """What one process knows of the segments that come into a folder.

    Nobody waits when there was no sign of the mirror for `silence` seconds; see `MirrorLock.beat`.
    """

    def __init__(self, directory: CacheDirectory, silence: float = 2.0) -> None:
        self._silence = silence
        self._fs = directory.fs
        self._mirror = os.path.join(directory.path, MIRROR)
        self._taken = 0.0  # seconds that the ranges of the last large batch took

    def took(self, size: float, seconds: float) -> None:
        """Note how long ranges took that have some bytes."""
        if size > _SMALL:
            self._taken = seconds

    def wait(self, needed: Mapping[str, float]) -> None:
        """Wait while segments come, as long as that is worth it: `needed` are bytes by the paths of files."""
        begun = heard = time.monotonic()
        sign, missing = self._sign(), dict(needed)
        if time.time_ns() - sign > self._silence * 1e9:
            return
        while time.monotonic() < min(begun + _TIMES * self._taken, heard + self._silence):
            missing = {path: size for path, size in missing.items() if not self._fs.is_file(path)}
            if sum(missing.values()) <= _SMALL:
                return
            time.sleep(_LOOK_EVERY)
            if sign != (sign := self._sign()):
                heard = time.monotonic()

    def _sign(self) -> int:
        try:
            return self._fs.changed(self._mirror)
        except OSError:
            return 0
