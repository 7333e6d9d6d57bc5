"""Writers that are killed at random points: what was sealed is there and right, and nothing stands in the way."""

import os

import pytest

from tests import _warm

SOAK = bool(os.environ.get("SOAK"))
CYCLES = 2000 if SOAK else 15


@pytest.mark.parametrize("how", ["tier", "module"])
def test_what_was_flushed_survives_sigkill_and_nothing_else_stays(how, tmp_path):
    script = f"import runpy, sys\nsys.path.insert(0, {str(_warm.ROOT)!r})\nrunpy.run_module('tests._killer', run_name='__main__')"
    seed = int.from_bytes(os.urandom(4), "little")
    process = _warm.start(script, tmp_path / "cache" / "rows", CYCLES, seed, how)
    process.done(timeout=36_000 if SOAK else _warm.DEADLINE)
    left, flushed = map(int, process.words)
    # It was worth it: some died while they wrote, and some had flushed before.
    assert left > 0 and flushed > 0, f"seed {seed}"
