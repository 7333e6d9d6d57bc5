"""`examples/portable_folder.py` runs, and does what it says."""

import os
import re

import pytest

from tests.helpers import warm
from tests.helpers.examples import EXAMPLES, LIBRARIES

pytestmark = pytest.mark.slow

SOAK = bool(os.environ.get("SOAK"))

# The processes that serve are forked, which saves each of them its imports.
FORKING = f"""
import io, os, subprocess, sys, traceback, types, warnings
sys.path.insert(0, {str(EXAMPLES)!r})
import portable_folder

def run(command, input, **options):
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the server is a thread
        child = os.fork()
    if child == 0:
        try:
            os.dup2(write, 1)
            sys.argv, sys.stdin = command[1:], io.StringIO(input)
            portable_folder.main()
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    with open(read) as file:
        said = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return subprocess.CompletedProcess(command, 0, said)

if "--forks" in sys.argv:
    sys.argv.remove("--forks")
    portable_folder.subprocess = types.SimpleNamespace(run=run, PIPE=None)
portable_folder.main()
"""


@pytest.mark.parametrize("how", ["--forks", *[""] * SOAK], ids=lambda how: "forked" if how else "started")
def test_a_folder_is_served_from_a_tar_file_and_from_a_bucket(how):
    words = ["--items", 40, "--workers", 1, *how.split()]
    done = warm.run(FORKING, *words, warnings=["error"], imports=LIBRARIES)
    assert "all samples equal bit by bit, from the tar file and from the bucket" in done.out
    assert re.findall(r"epoch (\d): (\d+) samples", done.out) == [("1", "40"), ("2", "40")] * 2
    assert "secret" not in done.out + done.err
