"""`@torchcache`: caching for modules and functions."""
