"""What people write today: outputs are those without the cache, and each item is computed once."""

import functools
import json

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.helpers import warm
from tests.helpers.examples import LIBRARIES
from tests.torch.zoo import pipelines
from tests.torch.zoo.checks import check_same
from torchcache2 import cache_of, torchcache

pytestmark = [
    pytest.mark.slow,
    # peft asks transformers in a way that the newest one has deprecated.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
# What `examples` has runs there every day; some others need libraries of the group `zoo`.
DAILY = ("prompts", "reference", "layers")
OTHERS = tuple(name for name in pipelines.PIPELINES if name not in DAILY)
SECOND = "import sys; from tests.torch.zoo.pipelines import main; main(*sys.argv[1:])"


def check_equal(name, output, expected, *, exact):
    """Fail unless two outputs are equal, in type too."""
    assert pytree.tree_map(type, output) == pytree.tree_map(type, expected), name
    check_same(name, pytree.tree_map(tensor, output), pytree.tree_map(tensor, expected), exact=exact)


def tensor(leaf):
    return torch.from_numpy(leaf) if type(leaf).__module__ == "numpy" else leaf


def counted(decorated):
    """Hits, misses and bypasses of all caches of a pipeline."""
    counts = [cache_of(thing).stats() for thing in decorated]
    return (
        sum(count.hits for count in counts),
        sum(count.misses for count in counts),
        {reason: number for count in counts for reason, number in count.bypasses.items()},
    )


def check_first_process(name, folder):
    """Run a pipeline for two epochs, in other orders, with the cache and without; return what was found."""
    build = pipelines.PIPELINES[name]
    plain, _ = build(pipelines.plain)
    run, decorated = build(functools.partial(torchcache, persistent_cache_dir=folder))
    items = len(decorated) * pipelines.ITEMS
    if name == "clip":
        items *= 2  # an image and a text

    # The same batches as without the cache: they are computed as a whole.
    check_equal(name, pipelines.epoch(run, 0), pipelines.epoch(plain, 0), exact=True)
    assert counted(decorated) == (0, items, {}), name
    found = pipelines.epoch(run, 1)
    check_equal(name, found, pipelines.epoch(plain, 1), exact=False)
    assert counted(decorated) == (items, items, {}), name
    for thing in decorated:
        cache_of(thing).close()
    return pipelines.digest(found)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(DAILY, id="daily"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.soak),
    ],
)
def test_pipelines_are_equal_and_the_second_process_computes_nothing(names, tmp_path):
    if names is OTHERS:
        for library in ("torchvision", "timm", "open_clip", "sentence_transformers"):
            pytest.importorskip(library)
    digests = {name: check_first_process(name, tmp_path / name) for name in names}
    second = warm.run(SECOND, tmp_path, *names, cwd=warm.ROOT, imports=LIBRARIES)
    report = json.loads(second.out)
    assert {name: report[name][2] for name in names} == digests
    for name in names:
        misses, bypasses, _ = report[name]
        assert (misses, [*filter(None, bypasses)]) == (0, []), name
