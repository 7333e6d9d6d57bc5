"""XXH3-128 on an accelerator."""
