"""A probe that is trained by several ranks has the losses that it has without the cache."""

import json

import pytest
import torch

from tests.helpers.gloo import run_ranks

pytestmark = pytest.mark.slow
TRAINING = """
import json
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

folder = ARGUMENTS[0]
join()


class Backbone(nn.Sequential):
    def encode(self, x):
        return self(x)


def train():
    torch.manual_seed(0)
    items = torch.randn(96, 16)
    dataset = TensorDataset(items, items.abs().argmax(dim=1) % 4)
    backbone = Backbone(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)).eval().requires_grad_(False)
    head = DistributedDataParallel(nn.Linear(32, 4))
    options = {"enabled": bool(folder), "persistent_cache_dir": folder or None}
    backbone = torchcache(methods=("encode",), **options)(backbone)
    sampler = DistributedSampler(dataset)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, labels in DataLoader(dataset, 16, sampler=sampler):
            loss = F.cross_entropy(head(backbone.encode(x)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    stats = backbone.cache_instance.stats()
    backbone.cache_instance.close()
    print(json.dumps({"losses": losses, "hits": stats.hits, "misses": stats.misses, "faults": stats.faults}))


train()
"""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """What both ranks have reported of a training without the cache, of a first one with it, of a second."""
    path = tmp_path_factory.mktemp("ranks")
    reports = []
    for folder in ("", path / "rows", path / "rows"):
        ranks = run_ranks(TRAINING, path, folder, imports=("torch._dynamo",))
        reports.append([json.loads(rank.out.splitlines()[-1]) for rank in ranks])
    return reports


def test_losses_are_those_without_the_cache(trainings):
    for rank in range(2):
        off, cold, warm = (torch.tensor(reports[rank]["losses"]) for reports in trainings)
        assert len(off) == 9 and off[-1] < off[0]
        torch.testing.assert_close(cold, off)
        torch.testing.assert_close(warm, off)


def test_an_item_is_computed_once_by_both_ranks_and_not_again_by_the_next_run(trainings):
    off, cold, warm = trainings
    assert all(report["hits"] == report["misses"] == 0 for report in off)
    assert sum(report["misses"] for report in cold) == 96
    assert sum(report["hits"] for report in cold) == 2 * 96
    assert [(report["hits"], report["misses"]) for report in warm] == [(3 * 48, 0), (3 * 48, 0)]
    assert all(report["faults"] == 0 for report in cold + warm)
