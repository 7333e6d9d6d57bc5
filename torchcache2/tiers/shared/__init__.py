"""Rows in memory that the processes of a node share."""
