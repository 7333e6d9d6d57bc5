"""Find, claim, compute, keep, put together."""
