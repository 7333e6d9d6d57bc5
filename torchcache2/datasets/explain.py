"""For people: why samples of a dataset were not found, and what ``fingerprint.json`` says about a dataset."""

from __future__ import annotations

from typing import Any

import torch

from torchcache2.core.version import __version__
from torchcache2.datasets.fingerprint import Identity
from torchcache2.engine.cache import now as time_now
from torchcache2.engine.explain import compared
from torchcache2.files.directory import CacheDirectory
from torchcache2.identity.encoding import qualified_name
from torchcache2.identity.fingerprint import Fingerprint


def explained_dataset(
    name: str,
    kind: str,
    now: Fingerprint,
    directory: CacheDirectory | None,
    since: str,
    bypass: str | None,
) -> str:
    """Why samples of a dataset may not have been found, one line for each reason.

    Parameters
    ----------
    name, kind : str
        What messages call the dataset, and the ``class`` of its `document`.
    now : Fingerprint
        That of the dataset.
    directory : CacheDirectory, optional
        Where other datasets of the class may have left theirs.
    since : str
        When this run began, as an ISO time.
    bypass : str, optional
        Why nothing is cached.

    Returns
    -------
    str
        Lines such as ``attribute transform.size: 224 → 256``.
    """
    if directory is None and bypass is None:
        return "samples are in memory only, so there is no folder to compare with: give CachedDataset a path"
    return compared(name, kind, now, None, bypass, directory, since)


def document(
    identity: Identity, dataset: Any, length: int | None, name: str | None, version: str | int | None
) -> dict[str, Any]:
    """What the namespace of a dataset stands for, as JSON for ``fingerprint.json``."""
    said = {"length": length, "name": name, "version": None if version is None else str(version)}
    return document_of(identity, qualified_name(type(dataset))) | {"dataset": said}


def document_of(identity: Identity, kind: str) -> dict[str, Any]:
    """The same of anything that has an identity, whose class is called `kind`."""
    return {
        "class": kind,
        "library": __version__,
        "torch": str(torch.__version__),
        "created": time_now(),
        "parts": {part: data.hex() for part, data in identity.fingerprint.parts.items()},
        "values": dict(identity.fingerprint.values),
    }
