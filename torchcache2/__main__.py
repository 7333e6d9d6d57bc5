"""``python -m torchcache2``."""

from torchcache2.cli.main import main

if __name__ == "__main__":
    main()
