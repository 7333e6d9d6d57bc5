"""What differs between a namespace and the one before it, in this process or in the cache directory."""

from __future__ import annotations

from torchcache2.files.directory import CacheDirectory
from torchcache2.identity.fingerprint import Fingerprint, differences, from_document

__all__ = ["compared"]


def compared(
    name: str,
    kind: str,
    now: Fingerprint,
    before: Fingerprint | None,
    bypass: str | None,
    directory: CacheDirectory | None,
    since: str,
) -> str:
    """Why rows of `name`, whose class is `kind`, may not have been found.

    `before` is the fingerprint before that of `now`, `bypass` says why nothing is cached, and `since` is when
    this run began, as an ISO time.
    """
    lines = [f"not cached: {bypass}"] if bypass is not None else []
    if before is not None:
        lines += differences(before, now)
    if lines:
        return "\n".join(lines)
    first = f"namespace {now.namespace.hex()} is the first of {name} in this process"
    if directory is None:
        return first
    known = _latest(directory, kind, now.namespace, since)
    if known is None:
        return f"{first}, and in {directory.path}"
    if known.namespace == now.namespace:
        return f"{first}; an earlier run has left rows of it in {directory.path}"
    lines = differences(known, now)
    return "\n".join([f"compared with {known.namespace.hex()} in {directory.path}:", *lines])


def _latest(directory: CacheDirectory, kind: str, namespace: bytes, since: str) -> Fingerprint | None:
    """The fingerprint that earlier runs have left of a namespace, else of the class's last used one."""
    try:
        contents = [one for one in directory.scan() if one.segments]
    except OSError:
        return None
    contents.sort(key=lambda one: (one.namespace == namespace.hex(), one.last_used), reverse=True)
    for one in contents:
        document = directory.fingerprint(one.namespace)
        if one.namespace == namespace.hex() and str(document.get("created")) >= since:
            continue  # this run has written it
        if document.get("class") == kind and (fingerprint := from_document(one.namespace, document)):
            return fingerprint
    return None
