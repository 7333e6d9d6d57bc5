"""`python -m tests.benchmarks`, from the repository root: speed beside torchcache 0.6.0 and the machine."""

import torch

from tests.benchmarks import costs, hits
from tests.benchmarks.timing import machine


def main():
    print(machine(), flush=True)
    torch.manual_seed(0)
    hits.run()
    costs.gather()
    costs.misses()
    costs.bookkeeping()
    costs.call()


if __name__ == "__main__":
    main()
