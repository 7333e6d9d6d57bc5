"""Writers that are killed at random points: what was sealed is there and right, nothing is in the way."""

import os

import pytest

from tests.helpers import warm

SOAK = bool(os.environ.get("SOAK"))
CYCLES = 1000 if SOAK else 10
SCRIPT = "import runpy; runpy.run_module('tests.helpers.killer', run_name='__main__')"


@pytest.mark.slow
@pytest.mark.parametrize("files", ["local", "nfs"])
def test_what_was_flushed_survives_sigkill_and_nothing_else_stays(tmp_path, files):
    seed = int.from_bytes(os.urandom(4), "little")
    process = warm.start(SCRIPT, tmp_path / "cache" / "rows", CYCLES, seed, files)
    process.done(timeout=36_000 if SOAK else warm.DEADLINE)
    left, flushed = map(int, process.words)
    # It was worth it: some had flushed before they died, and some died while they wrote.
    assert flushed > 0 and left > 0, seed
