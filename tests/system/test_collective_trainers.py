"""Ranks in step under Accelerate and Lightning, which start `torch.distributed` themselves."""

import importlib.util
import os
import socket

import pytest

from tests.helpers import warm

pytestmark = pytest.mark.skipif(not os.environ.get("SOAK"), reason="these libraries are slow to import")

BEGIN = """
import os, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch.utils.data import DataLoader
from tests.helpers.steps import Backbone, expected
from torchcache2 import torchcache

items = torch.arange(64.0)[:, None] * torch.ones(3)
backbone = torchcache(distributed="collective", probe=False)(Backbone())
"""
SCRIPTS = {
    "accelerate": """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(DataLoader(items, 8, shuffle=True))
head = accelerator.prepare(nn.Linear(3, 1))
for epoch in range(3):
    for x in loader:
        features = backbone(x)
        assert torch.equal(features, expected(x))
        accelerator.backward(head(features).sum())
    accelerator.wait_for_everyone()
""",
    "lightning": """
import lightning

class Probe(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def training_step(self, x, index):
        features = backbone(x)
        assert torch.equal(features, expected(x))
        return self.head(features).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Probe(), DataLoader(items, 8, shuffle=True))
""",
}
END = """
stats = backbone.cache_instance.stats()
print("\\n" + "counts", stats.misses, stats.hits, dict(stats.bypasses), stats.received > 0)
"""


@pytest.mark.parametrize("library", SCRIPTS)
def test_items_are_computed_once(library, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        env = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        env |= {"NODE_RANK": "0", "TORCHCACHE_JOB": f"{tmp_path} {rank}"}
        ranks.append(warm.start(BEGIN + SCRIPTS[library] + END, env=env, cwd=tmp_path))
    for rank in ranks:
        assert rank.done(timeout=120).out.splitlines()[-1] == "counts 32 64 {} True", rank.out
