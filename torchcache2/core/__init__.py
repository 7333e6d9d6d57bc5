"""What everybody speaks: rows, keys, options, locks, logs, errors."""
