"""Faces for datasets."""
