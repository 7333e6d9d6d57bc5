"""`python -m tests.benchmarks`, from the repository root: speed beside other caches and the machine."""

import argparse
from functools import partial
from pathlib import Path

import torch

from tests.benchmarks import (
    buckets,
    codecs,
    compiled,
    costs,
    datasets,
    disk,
    features,
    gpu,
    hits,
    index,
    large,
    lazy,
    loaders,
    losing,
    ranks,
    servers,
    sizes,
    slots,
    verify,
)
from tests.benchmarks.report import Report, command, machine

SECTIONS = {
    "hits": hits.run,
    "gpu": gpu.run,
    "costs": costs.run,
    "sizes": sizes.run,
    "losing": losing.run,
    "lazy": lazy.run,
    "compiled": compiled.run,
    "verify": verify.run,
    "codecs": codecs.run,
    "disk": disk.run,
    "index": index.run,
    "large": large.run,
    "features": features.run,
    "ranks": ranks.run,
    "slots": slots.run,
    "datasets": datasets.run,
    "loaders": loaders.run,
    "redis": servers.run,
    "buckets": buckets.run,
}
PLOTS = {"sizes": "sizes.png", "datasets": "shares.svg"}


def main():
    options = _options()
    for name in options.sections or SECTIONS:
        section, report = SECTIONS[name], Report()
        report.text(machine())
        report.text(f"`{command(name)}`")
        if name in PLOTS:
            section = partial(section, plot=Path(options.plots, PLOTS[name]))
        if name in ("disk", "index", "large", "features", "datasets", "loaders"):
            section = partial(section, folder=options.dir)
        torch.manual_seed(0)
        section(report)
        if options.markdown is not None:
            report.write(Path(options.markdown, f"{name}.md"))


def _options():
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    names = ", ".join(SECTIONS)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {names}; default: all")
    parser.add_argument("--markdown", metavar="PATH", help="also write a file for each section there")
    parser.add_argument(
        "--plots",
        metavar="PATH",
        default=".bench",
        help=f"the folder for {' and '.join(PLOTS.values())} (default: %(default)s)",
    )
    parser.add_argument(
        "--dir",
        metavar="PATH",
        help="where sections that measure disks write 3 GB and delete them (default: a temporary folder)",
    )
    options = parser.parse_args()
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"no section {name!r}; the sections are {names}")
    return options


if __name__ == "__main__":
    main()
