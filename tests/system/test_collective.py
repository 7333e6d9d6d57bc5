"""Ranks in step: they share rows and work, fail together, and may end one after another."""

import os
from pathlib import Path

from tests.helpers.stepruns import failures, shown

CASES = Path(__file__).parent / "collective"
SOAK = bool(os.environ.get("SOAK"))
PLACES = ["compute", "swap", "join"] + ["ask", "have", "tell", "exit"] * SOAK


def test_ranks_share_rows_and_work(tmp_path):
    failed = failures(CASES / "outputs.py", tmp_path, ranks=3 + SOAK)
    assert not failed, shown(failed)


def test_errors_reach_all_ranks(tmp_path):
    failed = failures(CASES / "errors.py", tmp_path, ranks=3)
    assert not failed, shown(failed)


def test_ranks_leave_a_loop_one_after_another(tmp_path):
    failed = failures(CASES / "ends.py", tmp_path, ranks=3)
    assert not failed, shown(failed)


def test_a_rank_that_is_killed_in_any_round_is_named(tmp_path):
    killed = [2 + number for number, place in enumerate(PLACES) if place != "exit"]
    ranks = 2 + len(PLACES)
    failed = failures(CASES / "kills.py", tmp_path, ranks=ranks, killed=killed, PLACES=" ".join(PLACES))
    assert not failed, shown(failed)
