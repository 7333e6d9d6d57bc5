"""What a person does with a cache directory: the commands of ``torchcache2``."""
