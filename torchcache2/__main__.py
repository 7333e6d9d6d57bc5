"""The command `torchcache2`, also ``python -m torchcache2``: starts it, or says what to install for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends with `SystemExit`.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: those of the process.
    """
    try:
        from torchcache2.cli.commands import run  # needs typer and rich, which not every user has
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("typer", "rich"):
            raise
        print(f'torchcache2 needs {library}: pip install "torchcache2[cli]"', file=sys.stderr)
        raise SystemExit(2) from None
    run(sys.argv[1:] if arguments is None else list(arguments))


if __name__ == "__main__":
    main()
