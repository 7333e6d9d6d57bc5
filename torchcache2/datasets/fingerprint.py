"""Stub."""

import hashlib
from typing import Any, NamedTuple

from torchcache2.engine.cache import now


class Identity(NamedTuple):
    namespace: bytes
    fingerprint: Any
    unread: list
    generators: list


def identify(dataset: Any, *, name: Any = None, version: Any = None) -> Identity:
    data = hashlib.md5(f"{name}{version}{type(dataset).__name__}".encode()).digest()
    return Identity(data, None, [], [])


def document(identity: Any, dataset: Any, length: Any, name: Any, version: Any) -> dict[str, Any]:
    return {
        "class": type(dataset).__name__,
        "created": now(),
        "dataset": {"length": length, "name": name, "version": version},
    }
