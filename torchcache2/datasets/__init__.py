"""Datasets: what their samples are kept in."""
