"""The common terms of all rooms: rows, keys, options, locks, logs, errors."""
