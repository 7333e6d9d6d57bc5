"""Rows in a bucket that fsspec reaches, with a local folder in front of it."""
