"""The common terms of all rooms."""

__version__ = "0.1.0"
