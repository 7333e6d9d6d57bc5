"""Ranks in step: ranks of a process group send each other their rows, and compute missing items once."""
