"""`Bucket`: where a cache directory is that a URL of fsspec names. No secret of it is in any text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any

from torchcache2.core.errors import OptionError
from torchcache2.core.extras import require
from torchcache2.core.sizes import Size, parse_size

__all__ = ["Bucket", "Secrets", "is_url"]

_EXTRAS = {  # the library that a scheme needs, and the extra that installs it
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
}
_EXAMPLES = "'s3://bucket/folder', 'gs://bucket/folder' or 'file:///mnt/share/folder'"


def is_url(path: Any) -> bool:
    """Whether a path is a URL."""
    return isinstance(path, str) and "://" in path


class Secrets(dict[str, Any]):
    """Options that are shown nowhere, and are in no pickle but one for a process that is being started."""

    def __repr__(self) -> str:
        return "{…}"

    def __reduce__(self) -> tuple[Any, ...]:
        is_for_child = get_spawning_popen() is not None
        return Secrets, (dict(self) if is_for_child else {},)

    def __deepcopy__(self, memo: dict[int, Any]) -> Secrets:
        return self


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Where rows are kept remotely, and the local folder in front of it.

    Attributes
    ----------
    url : str
        Such as ``s3://bucket/folder``, without a slash at the end.
    storage_options : Secrets
        What the file system of fsspec takes, such as keys.
    local_dir : str, optional
        The folder that has segments of the bucket, and new ones until they are uploaded. None: a temporary
        one.
    remote_size : int or str, optional
        How many bytes the folder in the bucket may have. None: any number.
    """

    url: str
    storage_options: Secrets = dataclasses.field(default_factory=Secrets, repr=False)
    local_dir: str | None = None
    remote_size: Size | None = None

    @classmethod
    def of(
        cls,
        url: str,
        *,
        local_dir: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        remote_size: Size | None = None,
        option: str = "path",
    ) -> Bucket:
        """From options as users give them; `option` is what they call the URL.

        Raises
        ------
        OptionError
            If an option cannot have its value, or a library is missing. Nothing is asked of the bucket yet.
        """
        scheme, _, rest = url.partition("://")
        if "@" in rest.partition("/")[0] and scheme not in ("abfs", "abfss"):
            raise OptionError(
                f"{option} is a URL with a name or a password, which messages would show: give these as "
                "storage_options="
            )
        if scheme in ("http", "https"):
            raise OptionError(
                f"{option}='{scheme}://…': nothing can be written to a web server; expected a URL such as "
                f"{_EXAMPLES}. The address of a storage server belongs into storage_options="
            )
        if not rest.strip("/"):
            raise OptionError(f"{option}={url!r} names no bucket: expected a URL such as {_EXAMPLES}")
        if storage_options is not None and not (
            isinstance(storage_options, Mapping) and all(isinstance(name, str) for name in storage_options)
        ):
            kind = type(storage_options).__name__
            raise OptionError(
                f"storage_options=…, a {kind}: expected a dict of what fsspec's file system takes"
            )
        if local_dir is not None:
            is_path = isinstance(local_dir, (str, os.PathLike)) and os.fspath(local_dir) != ""
            if not is_path or is_url(local_dir):
                raise OptionError(f"local_dir={local_dir!r}: expected None or the path of a local folder")
            local_dir = os.path.abspath(os.path.expanduser(os.fspath(local_dir)))
            if scheme in ("file", "local"):
                place = url.partition("://")[2]
                if os.path.realpath(place) == os.path.realpath(local_dir):
                    raise OptionError(
                        f"local_dir={local_dir!r} is the folder of {option} itself: what makes room there "
                        "would be lost. Give another one, or the folder as a path that is no URL"
                    )
        if remote_size is not None:
            if isinstance(remote_size, float):
                raise OptionError(
                    f"remote_size={remote_size!r}: expected bytes, or a text like '2TB': nobody knows what "
                    "is free in a bucket"
                )
            parse_size("remote_size", remote_size, free=None)
        cls._check_scheme(scheme, option)
        return cls(url.rstrip("/"), Secrets(storage_options or {}), local_dir, remote_size)

    @staticmethod
    def _check_scheme(scheme: str, option: str) -> None:
        library, extra = _EXTRAS.get(scheme, ("fsspec", "remote"))
        wanted = f"{option}='{scheme}://…'"
        fsspec = require("fsspec", "remote", wanted)
        require(library, extra, wanted)
        try:
            fsspec.get_filesystem_class(scheme)
        except ValueError:
            raise OptionError(
                f"{wanted}: fsspec knows no such scheme; expected a URL such as {_EXAMPLES}"
            ) from None
        except ImportError as error:
            raise OptionError(f"{wanted} needs a library that is not installed ({error})") from None

    def __hash__(self) -> int:
        return hash(self.url)
