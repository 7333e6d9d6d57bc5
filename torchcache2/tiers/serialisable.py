"""`Serialisable`: which outputs can be written so that another process can read them."""

from __future__ import annotations

from torchcache2.core.logs import ToldOnce
from torchcache2.core.rows import Schema
from torchcache2.files.errors import UnserialisableError
from torchcache2.files.layout import schema_text

_MOST_SCHEMAS = 1000


class Serialisable:
    """Warns once if outputs cannot be written; `message` has a placeholder for the reason."""

    def __init__(self, tell: ToldOnce, message: str) -> None:
        self._tell = tell
        self._message = message
        self._known: dict[Schema, bool] = {}

    def __call__(self, schema: Schema) -> bool:
        """Whether a schema has a JSON form; those that differ only in shapes are tried once."""
        known = self._known.get(schema.family)
        if known is None:
            try:
                schema_text(schema)
                known = True
            except UnserialisableError as error:
                self._tell("schema", self._message, str(error))
                known = False
            if len(self._known) > _MOST_SCHEMAS:
                self._known.clear()
            self._known[schema.family] = known
        return known
