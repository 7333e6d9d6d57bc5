"""Ranks in step: what the ranks of a process group have is sent, and what nobody has is computed once."""
