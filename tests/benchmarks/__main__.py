"""`python -m tests.benchmarks`, from the repository root: speed beside torchcache 0.6.0 and the machine."""

from tests.benchmarks import costs, hits
from tests.benchmarks.timing import machine


def main():
    print(machine(), flush=True)
    hits.run()
    costs.gather()
    costs.misses()
    costs.bookkeeping()
    costs.call()


if __name__ == "__main__":
    main()
