"""Rows in segments on disk."""
