"""What errors of buckets mean, and how they read."""

import asyncio
import errno

import pytest

from torchcache2.tiers.bucket.connection import Kind, Texts, kind_of


class SomeError(Exception):
    """An error of a library, with attributes."""

    def __init__(self, text="", **attributes):
        super().__init__(text)
        self.__dict__.update(attributes)


def of_boto(code, status):
    return {"response": {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}}


def named(name, base=Exception):
    return type(name, (base,), {"__module__": "a.library"})()


def caused(error, cause):
    error.__cause__ = cause
    return error


CASES = {
    "gone": (FileNotFoundError("one"), Kind.GONE),
    "folder": (IsADirectoryError(), Kind.GONE),
    "404": (SomeError(status=404), Kind.GONE),
    "416": (caused(OSError(errno.EINVAL, ""), SomeError(**of_boto("InvalidRange", 416))), Kind.SHORT),
    "archived": (SomeError(**of_boto("InvalidObjectState", 403)), Kind.GONE),
    "no-bucket": (caused(FileNotFoundError(), SomeError(**of_boto("NoSuchBucket", 404))), Kind.NO_BUCKET),
    "no-container": (SomeError(error_code="ContainerNotFound", status_code=404), Kind.NO_BUCKET),
    "401": (SomeError(code=401), Kind.REFUSED),
    "403-text": (SomeError(code="403"), Kind.REFUSED),
    "denied": (PermissionError(), Kind.REFUSED),
    "forbidden": (OSError("Forbidden: https://storage"), Kind.REFUSED),
    "expired": (caused(OSError(errno.EIO, ""), SomeError(**of_boto("ExpiredToken", 400))), Kind.REFUSED),
    "no-credentials": (named("NoCredentialsError"), Kind.REFUSED),
    "refresh": (named("RefreshError", type(named("GoogleAuthError"))), Kind.REFUSED),
    "transport": (named("TransportError", type(named("GoogleAuthError"))), Kind.FAULT),
    "503": (SomeError(code=503), Kind.FAULT),
    "429": (SomeError(status_code=429), Kind.FAULT),
    "slow-down": (caused(OSError(errno.EBUSY, ""), SomeError(**of_boto("SlowDown", 503))), Kind.FAULT),
    "timeout": (TimeoutError(), Kind.FAULT),
    "timeout-of-asyncio": (asyncio.TimeoutError(), Kind.FAULT),
    "reset": (ConnectionResetError(), Kind.FAULT),
    "no-route": (OSError(errno.EHOSTUNREACH, ""), Kind.FAULT),
    "endpoint": (named("EndpointConnectionError"), Kind.FAULT),
    "closed": (RuntimeError("Session is closed"), Kind.FAULT),
    "501": (SomeError(status=501), Kind.REFUSED),
    "full": (OSError(errno.ENOSPC, ""), Kind.FAULT),
    "programmer": (TypeError("unexpected keyword"), Kind.FAULT),
}


@pytest.mark.parametrize(("error", "kind"), CASES.values(), ids=CASES)
def test_what_an_error_means(error, kind):
    assert kind_of(error) is kind


def test_an_error_that_is_its_own_cause_is_looked_at_once():
    error = TypeError()
    error.__cause__ = error
    assert kind_of(error) is Kind.FAULT


def test_secrets_are_not_in_texts():
    options = {
        "key": "the-id",
        "secret": b"the-secret",
        "client_kwargs": {"aws_session_token": "the-token", "region_name": "eu-west-9"},
        "endpoint_url": "http://host:1",
        "many": ["of-a-list", 3, None],
        "connection_string": "AccountName=somebody;AccountKey=of-a-string==;",
    }
    said = (
        "the-id the-secret the-token eu-west-9 http://host:1/path?signature=abc&more "
        "https://name:password@proxy:1 of-a-list of-a-string=="
    )
    text = Texts(options).of(OSError(said + "\n of two lines"))
    assert text == "OSError: … … … eu-west-9 http://host:1/path?… https://…@proxy:1 … … of two lines"
    of_a_file = Texts({"key": "the-id\n", "secret": " the \t secret"})
    assert of_a_file.of(OSError("'the-id' or the \t secret")) == "OSError: '…' or …"
    assert Texts({}).of(ValueError()) == "ValueError"
    assert len(Texts({}).of(ValueError("x" * 1000))) < 400
