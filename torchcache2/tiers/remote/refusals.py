"""`Kind`: what an error of a bucket means, whichever library raised it; `Texts`: how it reads."""

from __future__ import annotations

import asyncio
import enum
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Kind(enum.Enum):
    """What an error means."""

    GONE = "there is no such object, or it ends before"
    NO_BUCKET = "there is no such bucket"
    REFUSED = "the credentials are not accepted"
    PASSING = "the network or the server fails, and may work in a moment"
    LASTING = "to try again would not help"


_STATUS = dict.fromkeys((401, 403), Kind.REFUSED) | dict.fromkeys((404, 410, 416), Kind.GONE)
_STATUS |= dict.fromkeys((408, 425, 429), Kind.PASSING)
_CODES = {"NoSuchBucket": Kind.NO_BUCKET, "ContainerNotFound": Kind.NO_BUCKET, "InvalidRange": Kind.GONE}
_CODES["InvalidObjectState"] = Kind.GONE  # the object is in an archive
_CODES |= dict.fromkeys(("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable"), Kind.PASSING)
_CODES |= dict.fromkeys(("ExpiredToken", "InvalidToken", "TokenRefreshRequired"), Kind.REFUSED)
# These are names and not classes, as the libraries are imported only when they are used.
_REFUSED = {
    "ClientAuthenticationError",
    "CredentialRetrievalError",
    "GoogleAuthError",
    "NoAuthTokenError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
}
_PASSING = {
    "ChecksumError",
    "ClientError",  # aiohttp's; botocore's class of this name is what a server has answered: see `_of_class`
    "ConnectTimeoutError",
    "EndpointConnectionError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "HTTPException",
    "IncompleteReadError",
    "ProxyConnectionError",
    "RequestException",
    "ResponseParserError",
    "SSLError",
    "ServiceRequestError",
    "ServiceResponseError",
    "TransportError",
}
_NETWORK = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETRESET}
_NETWORK |= {errno.EBUSY, errno.EAGAIN, errno.ESTALE, getattr(errno, "EREMOTEIO", errno.EBUSY)}
_HARMLESS = re.compile(r"url|region|project|endpoint|host|account_name|bucket", re.IGNORECASE)
_SHORTEST, _LONGEST = 4, 300


def kind_of(error: BaseException) -> Kind:
    """What an error means."""
    for one in _chain(error):
        kind = _said(one)
        if kind is not None:
            return kind
    for one in _chain(error):
        kind = _of_class(one)
        if kind is not None:
            return kind
    return Kind.LASTING


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was translated from."""
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__


def _said(error: BaseException) -> Kind | None:
    """What a server has said by a code, or by the status of its answer."""
    response = getattr(error, "response", None)
    code: Any = None
    status = [getattr(error, name, None) for name in ("code", "status", "status_code")]
    if isinstance(response, Mapping):  # botocore has such a one
        code = response.get("Error", {}).get("Code")
        status.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    elif response is not None:
        status.append(getattr(response, "status_code", None))
    code = code or getattr(error, "error_code", None)
    if isinstance(code, str) and code in _CODES:
        return _CODES[code]
    for number in status:
        if isinstance(number, str) and number.isdecimal():
            number = int(number)
        if isinstance(number, int):
            if number in _STATUS:
                return _STATUS[number]
            if 500 <= number < 600 and number != 501:
                return Kind.PASSING
    return None


def _of_class(error: BaseException) -> Kind | None:
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return Kind.GONE
    names = {base.__name__ for base in type(error).__mro__}
    if "TransportError" not in names and (
        isinstance(error, PermissionError) or names & _REFUSED or str(error).startswith("Forbidden: ")
    ):
        return Kind.REFUSED
    passing = (TimeoutError, asyncio.TimeoutError, ConnectionError, EOFError)
    if isinstance(error, passing) or (isinstance(error, OSError) and error.errno in _NETWORK):
        return Kind.PASSING
    if isinstance(error, RuntimeError) and "closed" in str(error):  # another thread has closed the session
        return Kind.PASSING
    is_clients = type(error).__module__.startswith("botocore") and type(error).__name__ == "ClientError"
    return Kind.PASSING if names & _PASSING and not is_clients else None


class Texts:
    """How errors read, without what is secret in some options."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        # In one line, as the texts: a secret that was read from a file may end with a newline.
        plain = {" ".join(secret.split()) for secret in _secrets(options)} - {""}
        self._secrets = sorted(plain, key=len, reverse=True)

    def of(self, error: BaseException) -> str:
        """What an error says in one line."""
        text = " ".join(str(error).split())
        for secret in self._secrets:
            text = text.replace(secret, "…")
        text = re.sub(r"//[^/@\s]*@", "//…@", text)  # a name and a password
        text = re.sub(r"(://[^?\s'\"]*)\?[^\s'\"]*", r"\1?…", text)  # signatures
        return f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__


def _secrets(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secrets(inner, str(key))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for inner in value:
            yield from _secrets(inner, name)
    elif isinstance(value, (str, bytes)) and len(value) >= _SHORTEST and not _HARMLESS.search(name):
        text = value if isinstance(value, str) else value.decode(errors="replace")
        yield text
        for part in text.split(";") if ";" in text else ():  # of a connection string
            key, _, inside = part.partition("=")
            yield from _secrets(inside, key)
