"""Two nodes whose memory has room for what they own, and for a part of what they receive."""

import json

from tests.helpers.gloo import run_ranks

SCRIPT = """
import json

os.environ["TORCHCACHE_JOB"] += f"/{RANK // 2}"
os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = "2", str(RANK % 2)
join()
torch.manual_seed(0)
items = torch.randn(400, 16)


@torchcache(distributed="collective", max_memory_cache_size="1200KB", probe=False)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 1000)

    def forward(self, x):
        return self.linear(x)


net = Net().eval()
expected = nn.functional.linear(items, net.linear.weight, net.linear.bias)
epochs = []
with torch.no_grad():
    for epoch in range(7):
        order = torch.randperm(200, generator=torch.Generator().manual_seed(epoch))[RANK::WORLD]
        order += 200 * (epoch >= 4)
        before = net.cache_instance.stats()
        for part in order.split(25):
            assert torch.allclose(net(items[part]), expected[part], atol=1e-5)
        torch.distributed.barrier()
        stats = net.cache_instance.stats()
        counts = [stats.misses - before.misses, stats.received - before.received]
        epochs.append([*counts, stats.memory_rows, stats.evictions, stats.faults])
        torch.distributed.barrier()
print(json.dumps(epochs))
"""


def test_replicas_make_room_for_rows_that_are_owned(tmp_path):
    ranks = run_ranks(SCRIPT, tmp_path, count=4, env={"TORCHCACHE_JOB": str(tmp_path)})
    for rank in ranks:
        computed, received, rows, evictions, faults = zip(*json.loads(rank.out), strict=True)
        assert computed == (50, 0, 0, 0, 50, 0, 0)  # the other items find room as if there were no replicas
        assert rows[0] == 100 and rows[3] > 150 and rows[4] >= 200
        assert received[0] == received[4] == 0 < received[3] < received[1]
        assert not any(evictions) and not any(faults)
