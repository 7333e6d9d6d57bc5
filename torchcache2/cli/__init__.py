"""The command line ``torchcache2``, for people who look into cache directories."""
