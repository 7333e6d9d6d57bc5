"""`SampleKeys`: the keys of samples, by their indices, or by what the user says which sample it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Keys, Positions, int_key
from torchcache2.datasets.identity import as_index, keys_of
from torchcache2.files.contents import FileDigests
from torchcache2.identity.arguments import ValueEncoder
from torchcache2.identity.encoding import UnencodableError
from torchcache2.identity.marks import ADDED_ATTRIBUTE, ORIGINAL_ATTRIBUTE


class SampleKeys:
    """Turns the indices of samples into keys.

    `given` is a sequence with an entry for each of `length` samples, or a function of the index; None: the
    index itself says which sample it is. An entry that is a path to a file stands for the file's content,
    which the `folder` of the cache remembers. A process reads each entry once, until `hold`.

    Only what is given is pickled.
    """

    def __init__(self, given: Any = None, length: int | None = None, folder: str | None = None) -> None:
        is_sequence = given is not None and not callable(given)
        self._given, self._folder, self.length = list(given) if is_sequence else given, folder, length
        if is_sequence:
            self.length = len(self._given)
            if length not in (None, self.length):
                raise OptionError(f"keys has {self.length:,} entries: expected one for each of {length:,}")
        self.are_given = given is not None
        self._files = FileDigests(folder)
        # The keys read so far, as two words each; zeros for all others.
        self._words = np.zeros((self.length or 0 if self.are_given else 0, 2), np.uint64)
        self.one: Callable[[int], tuple[int, int]] = self._one if self.are_given else int_key

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleKeys, (self._given, self.length, self._folder)

    def of(self, namespace: bytes, indices: Sequence[Any] | Positions) -> Keys:
        """The keys of the samples at n indices, each as from `as_index`."""
        if not self.are_given:
            return keys_of(namespace, indices)
        if isinstance(indices, np.ndarray):
            indices = indices.tolist()
        known, plain = self._words, list(map(self._plain, indices))
        if not all(map(self._is_known, plain)):
            data = b"".join(map(self._read, plain))
            return Keys(namespace, np.frombuffer(data, np.uint8).reshape(-1, 16))
        at: Positions = np.array(plain, np.int64)
        for index in at[~known[at].any(axis=1)].tolist():
            known[index] = np.frombuffer(self._read(index), "<u8")
        return Keys(namespace, known[at].astype("<u8", copy=False).view(np.uint8).reshape(-1, 16))

    def of_views(self, views: int) -> SampleKeys:
        """The keys of all variants of the samples, the first variant of each first."""
        if views == 1 or not self.are_given or self.length is None:
            return self
        given, length = self._given, self.length

        def of_variant(index: int) -> tuple[Any, int]:
            view, number = divmod(index, length)
            return given(number) if callable(given) else given[number], view

        return SampleKeys(list(map(of_variant, range(views * length))), views * length, self._folder)

    def hold(self, keys: Keys, indices: Sequence[Any]) -> bool:
        """Whether samples still have these keys, read anew: a file may be edited while a sample is loaded."""
        if not self.are_given:
            return True
        self._words[[at for at in map(self._plain, indices) if self._is_known(at)]] = 0
        return np.array_equal(self.of(keys.namespace, indices).data, keys.data)

    def _one(self, index: int) -> tuple[int, int]:
        """The two words of the key of an index from 0 on."""
        low, high = self._words[index].tolist() if index < len(self._words) else (0, 0)
        if not (low or high):
            low, high = self.of(bytes(16), [index]).words[0].tolist()
        return low, high

    def _is_known(self, index: Any) -> bool:
        """Whether the key of an index is remembered once it is read."""
        return type(index) is int and 0 <= index < len(self._words)

    def _plain(self, index: Any) -> Any:
        """An index from the start; negative ones of a dataset with a length count from its end."""
        return index + self.length if type(index) is int and index < 0 and self.length else index

    def _read(self, index: Any) -> bytes:
        """The key of a sample, 16 bytes."""
        if type(index) is int and index < 0 and self.length is not None:
            raise IndexError(f"index {index} of {self.length} samples")
        entry = self._given(index) if callable(self._given) else self._given[index]
        where = f"keys[{index!r}]"
        try:
            return xxh3_128_digest(ValueEncoder(self._files.of).encode(_plain_entry(entry), where))
        except (TypeError, UnencodableError) as error:
            raise OptionError(
                f"{where} is a {type(entry).__name__}: expected a text, int, bytes or path, or a tuple of "
                f"these ({error})"
            ) from None


def _plain_entry(entry: Any) -> Any:
    if isinstance(entry, tuple):
        return tuple(map(_plain_entry, entry))
    return entry if isinstance(entry, os.PathLike) else as_index(entry, "a key")


# An attribute of a dataset that is one of these is not part of it.
setattr(SampleKeys, ADDED_ATTRIBUTE, True)
setattr(SampleKeys, ORIGINAL_ATTRIBUTE, property(lambda self: None))
