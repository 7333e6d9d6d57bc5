"""Actors of the real Ray: the example, the recipe, and what a kill costs. One cluster for all of it."""

import json
import re
import secrets
import tempfile

import pytest

from tests.helpers import warm
from tests.helpers.examples import EXAMPLES, LIBRARIES, code_and_output

# Its processes need more than two cores to be in time beside other tests.
pytestmark = pytest.mark.soak

WARNED = ["error", "ignore::DeprecationWarning", "ignore::FutureWarning"]  # Ray warns of itself
PATIENCE = 240.0  # seconds: its processes take many

# The driver has computed some items before. One of two actors is killed when both have computed some.
CLUSTER = """
import json, os, signal, sys, tempfile, time
from pathlib import Path
import ray, ray.data, torch
from torch import nn
from torchcache2 import torchcache

notes = sys.argv[1]
shared = set(os.listdir("/dev/shm"))
ray.init(num_cpus=2, include_dashboard=False)

@torchcache(probe=False)  # which computes all of an actor's first batch
class Backbone(nn.Linear):
    def __init__(self):
        super().__init__(1, 3, bias=False)
        nn.init.ones_(self.weight)

    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

def noted(what):
    return [name for name in os.listdir(notes) if name.startswith(what)]

def note(name, value=None):
    Path(notes, name).write_text(json.dumps(value))

class Embed:
    def __init__(self):
        self.backbone = Backbone().eval().requires_grad_(False)
        self.calls = 0
        note(f"actor-{os.getpid()}")
        end = time.monotonic() + 30
        while len(noted("actor-")) < 2 and time.monotonic() < end:
            time.sleep(0.01)

    def __call__(self, batch):
        output = self.backbone(torch.tensor(batch["item"])[:, None].float())
        stats, self.calls = self.backbone.cache_instance.stats(), self.calls + 1
        note(f"stats-{os.getpid()}", [stats.misses, stats.hits])
        if self.calls == 3 and len(noted("stats-")) == 2 and not noted("killed"):
            note(f"killed-{os.getpid()}")
            os.kill(os.getpid(), signal.SIGKILL)
        return {"item": batch["item"], "output": output.sum(dim=1).numpy()}

driver = Embed.__new__(Embed)
driver.backbone = Backbone().eval().requires_grad_(False)
driver.backbone(torch.arange(100.0)[:, None])
dataset = ray.data.from_items([{"item": number} for number in range(640)], override_num_blocks=20)
pool = ray.data.ActorPoolStrategy(size=2)
rows = dataset.map_batches(Embed, batch_size=32, compute=pool, num_cpus=0.5).take_all()
wrong = [row["item"] for row in rows if row["output"] != 3 * row["item"]]
counts = [json.loads(Path(notes, name).read_text()) for name in noted("stats-")]
in_memory = driver.backbone.cache_instance.stats().memory_rows
driver.backbone.cache_instance.close()
end = time.monotonic() + 30
jobs = os.path.join(tempfile.gettempdir(), f"torchcache2_ranks_{os.getuid()}")
while os.listdir(jobs) and time.monotonic() < end:
    time.sleep(0.05)
print(json.dumps({
    "rows": len(rows), "wrong": wrong, "counts": counts, "memory": in_memory,
    "killed": len(noted("killed-")), "jobs": os.listdir(jobs),
    "shared": sorted(set(os.listdir("/dev/shm")) - shared),
    "address": ray.get_runtime_context().gcs_address,
}), flush=True)
while not noted("end"):
    time.sleep(0.05)
ray.shutdown()
print("shared:", sorted(set(os.listdir("/dev/shm")) - shared))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment in which Ray finds the cluster, and what its first job has told."""
    folder = tmp_path_factory.mktemp("ray")
    (notes := folder / "notes").mkdir()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # names of sockets are short
        environment = {
            "TMPDIR": str(folder),
            "RAY_TMPDIR": short,
            "TORCHCACHE_DISABLE": "",
            "TORCHCACHE_JOB": "",
        }
        # Otherwise a process that takes more than a minute to start is killed, and so is the next one.
        environment |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_register_timeout_seconds": str(int(PATIENCE)),
        }
        # All drivers have the password of the cluster, which others on this network can reach.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        driver = warm.start(CLUSTER, notes, env=environment, warnings=WARNED, imports=LIBRARIES)
        driver.until('"address"', PATIENCE)
        told = json.loads(driver.out.splitlines()[-1])
        yield environment | {"RAY_ADDRESS": told["address"]}, told
        (notes / "end").touch()
        assert driver.done().out.splitlines()[-1] == "shared: []"


def test_a_killed_actor_costs_nothing_that_it_had_put_and_leaves_nothing(cluster):
    _, told = cluster
    assert (told["rows"], told["wrong"], told["killed"]) == (640, [], 1)
    # Each item is computed once, by the driver, the killed actor, the other one, or the one in its place.
    assert sum(misses for misses, _ in told["counts"]) == 640 - 100
    assert told["memory"] == 640
    assert told["jobs"] == [] and told["shared"] == []


def test_actors_compute_each_image_once_and_none_in_the_second_run(cluster):
    environment, _ = cluster
    arguments = ["--items", 300, "--address", environment["RAY_ADDRESS"]]
    script = EXAMPLES / "ray_embed.py"
    process = warm.start(script, *arguments, env=environment, warnings=WARNED, imports=LIBRARIES)
    done = process.done(timeout=PATIENCE)
    (first, second) = re.findall(r"run: +[\d.]+ s, (\d+) computed, (\d+) found$", done.out, re.MULTILINE)
    assert second == ("0", "600")
    computed, found = map(int, first)
    assert computed + found == 600 and 300 <= computed <= 300 + 2 * 64  # the first batch of each is whole
    assert "equal to each other bit by bit" in done.out
    assert "torchcache2]" not in done.err  # no warning of ours


def test_the_example_refuses_no_images():
    assert (
        "at least 1 image"
        in warm.start(EXAMPLES / "ray_embed.py", "--items", 0, imports=LIBRARIES).done(2).err
    )


def test_the_recipe_prints_what_its_page_says(cluster, tmp_path):
    environment, _ = cluster
    code, output = code_and_output("ray")
    (script := tmp_path / "recipe.py").write_text(code)
    process = warm.start(script, cwd=tmp_path, env=environment, warnings=WARNED, imports=LIBRARIES)
    done = process.done(timeout=PATIENCE)
    assert done.out == output
    assert "torchcache2]" not in done.err
