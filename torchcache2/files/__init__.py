"""Bytes on disk: the cache directory, segments, codecs, and every call to the system about files."""
