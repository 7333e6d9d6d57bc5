"""A module that is loaded at the first miss, in processes that share a folder or memory."""

import json

import pytest

from tests.helpers import ranks

LAZY = """
from torchcache2 import LazyModule

FOLDER = sys.argv[1]
WEIGHTS, LOG = FOLDER + "/weights.pt", FOLDER + "/loads"


def load():
    import colorsys  # what a loader imports is known before it runs

    with open(LOG, "a") as log:
        log.write("x")
    time.sleep(0.3)
    net = Backbone()
    net.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    return net


if RANK == 0:
    torch.save(Backbone().state_dict(), FOLDER + "/new")
    os.rename(FOLDER + "/new", WEIGHTS)
while not os.path.exists(WEIGHTS):
    time.sleep(0.001)
options = json.loads(sys.argv[2])
net = torchcache(**options)(LazyModule(load, files=WEIGHTS))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_persistent", [False, True])
def test_one_rank_loads_it_if_one_computes(tmp_path, is_persistent):
    script = LAZY + "assert torch.equal(net(ITEMS), expected(ITEMS)); report(net, loaded=net.is_loaded)"
    options = {"probe": False}
    options |= {"persistent_cache_dir": str(tmp_path / "cache")} if is_persistent else {}
    reports = ranks.run(script, str(tmp_path), str(tmp_path), json.dumps(options), ranks=2)
    assert (tmp_path / "loads").read_text() == "x"
    assert sorted(one["loaded"] for one in reports) == [False, True]
    assert sum(one["misses"] for one in reports) == 192 and all(one["bypasses"] == {} for one in reports)


def test_another_process_finds_all_and_never_loads_it(tmp_path):
    arguments = str(tmp_path), json.dumps({"persistent_cache_dir": str(tmp_path / "cache")})
    for _ in range(2):
        script = LAZY + "net(ITEMS); net.cache_instance.flush(); report(net, loaded=net.is_loaded)"
        (found,) = ranks.run(script, str(tmp_path), *arguments, ranks=1)
    assert (tmp_path / "loads").read_text() == "x"
    assert found["hits"] == 192 and not found["loaded"]
