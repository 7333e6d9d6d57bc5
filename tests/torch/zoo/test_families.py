"""One model of each family that is installed; what takes long, so `make soak` runs it, with ``-s``."""

import collections
import importlib
import os
import time

import pytest

from tests.torch.zoo import checks
from tests.torch.zoo.families import SkippedError, time_box

SECONDS = int(os.environ.get("ZOO_SECONDS", "120"))  # for each model
SHARE = os.environ.get("ZOO_SHARE", "1/1")  # the first of so many parts of the families, for a short run
LIBRARIES = ("timm", "torchvision", "transformers", "open_clip")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore"),  # of hundreds of models some have deprecated something
]


def outcome(family):
    """What came of a family: passed, bypassed, skipped or failed, and why."""
    try:
        with time_box(SECONDS):
            entry = family.entry()
            plain = checks.seeded(entry.build)
            try:
                plain(**checks.some_items(entry, checks.all_items(entry), [0, 1]))
            except TimeoutError:
                raise
            except Exception as error:
                return "skipped", f"does not run: {type(error).__name__}"
            try:
                checks.check_entry(entry)
                checks.check_guessed_edits(entry)
            except checks.BypassedError as error:
                checks.check_passed_through(entry)
                return "bypassed", str(error)
    except (SkippedError, TimeoutError) as error:
        return "skipped", str(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


@pytest.mark.parametrize("library", LIBRARIES)
def test_families(library):
    pytest.importorskip(library)
    families = importlib.import_module(f"tests.torch.zoo.families_{library}").families()
    part, parts = map(int, SHARE.split("/"))
    families = families[part - 1 :: parts]
    found = collections.defaultdict(list)
    for number, family in enumerate(families, 1):
        start = time.perf_counter()
        kind, why = outcome(family)
        found[kind].append((family, why))
        seconds = time.perf_counter() - start
        print(f"{number}/{len(families)} {family}: {kind} {why[:200]} ({seconds:.1f} s)", flush=True)
    print(f"\n{library}: " + ", ".join(f"{len(items)} {kind}" for kind, items in found.items()))
    for kind in ("bypassed", "skipped", "failed"):
        reasons = collections.defaultdict(list)
        for family, why in found[kind]:
            reasons[why].append(family.name)
        for why, names in sorted(reasons.items()):
            print(f"  {kind:<9}{why}: {', '.join(names)}")
    assert not found["failed"]
