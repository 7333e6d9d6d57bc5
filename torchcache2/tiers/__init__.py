"""Stores of rows by key; `base` is their contract."""
