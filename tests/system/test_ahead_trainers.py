"""Loops of Accelerate and Lightning over batches whose rows are read ahead."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.outputs import frozen
from torchcache2 import torchcache

ITEMS = torch.arange(60.0)[:, None] * torch.ones(3)


@pytest.fixture
def backbone(path):
    backbone = torchcache(persistent_cache_dir=path, max_memory_cache_size=0)(frozen(nn.Linear(3, 2)))
    backbone.cache_instance.warmup(ITEMS)
    return backbone


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("leaves_early", [False, True])
def test_accelerate_knows_which_batch_is_the_last(backbone, leaves_early):
    """Else gradients that are accumulated would not be applied at the end of an epoch."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    head = nn.Linear(2, 1)
    head, optimizer, plain = accelerator.prepare(
        head, torch.optim.SGD(head.parameters(), 0.01), DataLoader(ITEMS, 8)
    )

    def run(batches):
        steps, accelerator.step = [], 0
        for i, x in enumerate(batches):
            with accelerator.accumulate(head):
                features = backbone(x)
                torch.testing.assert_close(features, x @ backbone.weight.T + backbone.bias)
                accelerator.backward(head(features).sum() * 1e-6)
                state = accelerator.gradient_state
                steps.append((accelerator.sync_gradients, state.end_of_dataloader, state.remainder))
                optimizer.step()
            if leaves_early and i == 5:
                break
        return steps, accelerator.gradient_state.in_dataloader, plain.iteration

    ahead = backbone.cache_instance.ahead(plain, batches=3)
    (steps, inside, first), (steps_ahead, inside_ahead, second) = run(plain), run(ahead)
    assert steps_ahead == steps and second == first + (not leaves_early)
    if not leaves_early:
        assert [synced for synced, *_ in steps] == [False, False, False, True] * 2
        assert steps[-1] == (True, True, 60 % 8) and not (inside or inside_ahead)
        assert len(ahead) == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_on_what_is_read_ahead(backbone):
    lightning = pytest.importorskip("lightning")
    seen = []

    class Probe(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 1)

        def training_step(self, x, index):
            features = backbone(x)
            torch.testing.assert_close(features, x @ backbone.weight.T + backbone.bias)
            seen.append((index, x[:, 0].tolist(), self.trainer.is_last_batch))
            return self.head(features).sum() * 1e-6

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, enable_model_summary=False, barebones=False, **options
    )
    trainer.fit(Probe(), backbone.cache_instance.ahead(DataLoader(ITEMS, 8)))
    epoch = [(i, part[:, 0].tolist(), i == 7) for i, part in enumerate(ITEMS.split(8))]
    assert seen == epoch * 2
    assert backbone.cache_instance.stats().misses == 60
