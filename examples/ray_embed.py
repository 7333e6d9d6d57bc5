"""Embeddings made by Ray Data: actors share memory and work, and a second run only reads.

``dataset.map_batches(Embed, …)`` keeps an `Embed` with its model in each of two actors. Those of one machine
find each other by the job's id: nothing has to be set. Each image is in the dataset twice, and is computed
once over both actors. All rows are in a folder too, so the actors of the second run compute nothing.

The images are scikit-learn's 1797 handwritten digits. With ``--address auto`` the actors are those of a Ray
cluster that runs already; then ``--cache-dir`` has to be a folder, bucket or server that all machines see.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np
import ray
import ray.data
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torchcache2 import cache_of, torchcache

ACTORS, BATCH = 2, 64


class Backbone(nn.Module):
    """Turns images (n, 8, 8) into features (n, 128)."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(1, 64, 3, padding=1), nn.Conv2d(64, 128, 3, padding=1)
        self.layers = nn.Sequential(first, nn.GELU(), second, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        """The features of a batch of images."""
        return self.layers(images.unsqueeze(1))


def make_backbone() -> Backbone:
    """The same weights in every process, as if they were loaded from a file."""
    torch.manual_seed(0)
    return Backbone().eval().requires_grad_(False)


class Embed:
    """What an actor keeps, and does with a batch."""

    def __init__(self, cache_dir: str) -> None:
        self.backbone = torchcache(persistent_cache_dir=cache_dir)(make_backbone())

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The features of a batch, and what this actor has computed and found so far."""
        features = self.backbone(torch.tensor(batch["image"])).numpy()
        stats = cache_of(self.backbone).stats()
        actor = ray.get_runtime_context().get_actor_id()
        told = {"actor": actor, "computed": stats.misses, "found": stats.hits}
        columns = {name: np.full(len(features), value) for name, value in told.items()}
        return {"index": batch["index"], "features": features, **columns}


def run(images: np.ndarray, cache_dir: str) -> tuple[np.ndarray, int, int]:
    """The features of all images, and how many were computed and found."""
    items = [{"index": index, "image": image} for index, image in enumerate(images)]
    embedded = ray.data.from_items(items, override_num_blocks=4 * ACTORS).map_batches(
        Embed,
        fn_constructor_args=[cache_dir],
        batch_size=BATCH,
        compute=ray.data.ActorPoolStrategy(size=ACTORS),
        num_cpus=0.5,  # or num_gpus=1
    )
    table = embedded.to_pandas().sort_values("index")
    counts = table.groupby("actor")[["computed", "found"]].max().sum()  # each actor's last ones
    return np.stack(table["features"].to_list()), int(counts["computed"]), int(counts["found"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=1797, metavar="N", help="default: %(default)s")
    parser.add_argument("--cache-dir", metavar="PATH", help="keep the rows there")
    parser.add_argument("--address", help="of a Ray cluster; default: one on this machine, for this script")
    options = parser.parse_args()
    if options.items < 1:
        parser.error("expected at least 1 image")

    if options.address is None:
        ray.init(num_cpus=2, include_dashboard=False)
    else:
        ray.init(options.address)
    digits = (load_digits().images[: options.items] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(digits)), 2))
    with tempfile.TemporaryDirectory() as temporary:
        cache_dir, runs = options.cache_dir or temporary, []
        for name in ("first", "second"):
            start = time.perf_counter()
            features, computed, found = run(digits[order], cache_dir)
            runs.append(features)
            seconds = time.perf_counter() - start
            print(f"{name + ' run:':<12} {seconds:5.1f} s, {computed} computed, {found} found", flush=True)
    ray.shutdown()

    assert np.array_equal(*runs), "the second run has found other features than were computed"
    expected = make_backbone()(torch.from_numpy(digits[order])).numpy()
    # The actors compute in other batches, where torch may add in another order.
    np.testing.assert_allclose(runs[0], expected, rtol=0, atol=1e-5)
    print("equal to each other bit by bit, and to the features without the cache but for rounding")


if __name__ == "__main__":
    main()
