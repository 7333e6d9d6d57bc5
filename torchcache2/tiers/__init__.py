"""Stores of rows by key, each one a folder."""
