"""The plots: µs per item against input size, and epochs against the share that is cached."""

import math

import matplotlib
import torch

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from tests.benchmarks.report import hardware

BATCH = 256
STYLES = [
    *(("#c1272d", "o"), ("#0000a7", "s"), ("#a0620a", "^")),
    *(("#008176", "D"), ("#7a3f9d", "v"), ("#4f7a1c", "P")),
]
GAP = 1.5  # labels are at least this factor apart on the logarithmic axis


def draw(path, title, times, reference):
    """Draw `times` (shape → name → `Times`) as a PNG; `reference` is dashed."""
    sizes = [4 * math.prod(shape) for shape in times]
    names = list(next(iter(times.values())))
    figure, axes = plt.subplots(figsize=(11, 5.8), layout="constrained")
    styles = iter(STYLES)
    ends = {}
    for name in names:
        values = [of_shape[name].median / BATCH * 1e6 for of_shape in times.values()]
        color, marker = ("#555555", "") if name == reference else next(styles)
        dashes = "--" if name == reference else "-"
        width = 2.6 if name == names[0] else 1.5
        axes.plot(sizes, values, dashes, color=color, marker=marker, markersize=6, linewidth=width)
        ends[name] = values[-1], color
    _label_lines(axes, sizes[-1], ends)
    axes.set(xscale="log", yscale="log", ylabel="µs per item (median)", xlabel="input of one item, float32")
    axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 14)  # room for the labels
    labels = [
        f"{'×'.join(map(str, shape))}\n{_bytes(size)}" for shape, size in zip(times, sizes, strict=True)
    ]
    axes.set_xticks(sizes, labels, fontsize=8.5)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.35, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    machine = f"{hardware()}, torch {torch.__version__}, torch threads: {torch.get_num_threads()}"
    axes.set_title(f"{title}\n{machine}", fontsize=10.5, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_shares(path, title, times, uncached, full):
    """Draw `times` (share → seconds of two epochs) as an SVG, beside a line from `uncached` to `full`."""
    shares = [100 * share for share in times]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    line = "second epoch, line between uncached and stocaching with all"
    axes.plot([0, 100], [uncached, full], "--", color="#555555", label=line)
    for (color, marker), name, epoch in zip(STYLES, ("second epoch", "first epoch"), (1, 0), strict=False):
        seconds = [epochs[epoch] for epochs in times.values()]
        axes.plot(shares, seconds, marker, color=color, markersize=8, label=f"{name}, torchcache2")
    axes.set(xlabel="samples that fit into RAM, %", ylabel="seconds", xlim=(-2, 102), ylim=(0, None))
    axes.grid(alpha=0.35, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    axes.set_title(f"{title}\n{hardware()}, torch {torch.__version__}", fontsize=10.5, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "shares"}):  # the same file for the same numbers
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _label_lines(axes, right, ends):
    """Write each name beside the end of its line, the lower ones pushed up where they would overlap."""
    lowest = 0.0
    for name, (value, color) in sorted(ends.items(), key=lambda item: item[1][0]):
        lowest = max(value, lowest * GAP)
        axes.annotate(name, (right * 1.18, lowest), color=color, va="center", fontsize=9.5)


def _bytes(size):
    return f"{size} B" if size < 1000 else f"{size / 1000:.3g} kB"
