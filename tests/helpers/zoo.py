"""Modules and functions whose fingerprints must be the same in every process.

As a script it prints, for each of them, its namespace and how many warnings there were, as JSON.
"""

import functools
import json
import logging
import warnings

import scipy.fft
import scipy.stats
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.fusion import fuse_conv_bn_eval

from torchcache2 import torchcache

SCALE = 3.0
COLOURS = {"red", "green", "blue", "amber", "violet"}
SIZES = frozenset({(1, "a"), (2, "b"), (3, "c")})


class Settings:
    def __init__(self, rate, names):
        self.rate = rate
        self.names = names


class First(nn.Module):
    """The first of the outputs of a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


class Attend(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, heads, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 3, padding_idx=0)

    def forward(self, x):
        return self.table((x * 10).long())


@torchcache
class Project(nn.Module):
    """Everything at once that a class of the user's own has."""

    factor = 2

    def __init__(self, width, *, settings, activation=torch.tanh, **extra):
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.settings = settings
        self.activation = activation
        self.extra = extra
        self.loose = [torch.arange(3.0), {"a": torch.ones(2)}]
        self.colours = set(COLOURS)
        self.partial = functools.partial(torch.add, alpha=2)
        self.layer.register_forward_hook(shift(0.5))

    @property
    def offset(self):
        return SCALE / 2

    @staticmethod
    def helper(x):
        return x * len(COLOURS)

    def forward(self, x):
        return self.helper(self.activation(self.layer(x))) * self.settings.rate + self.offset * self.factor


def shift(amount):
    return lambda module, args, output: output + amount


@torchcache
def function(x, *, power=2.0):
    return scaled(x) ** power + len(SIZES)


@functools.lru_cache
def scaling():
    return SCALE


def scaled(x):
    return x * scaling()


def bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    return BertModel(config).eval()


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def pruned():
    layer = nn.Linear(4, 3)
    prune.l1_unstructured(layer, "weight", 0.5)
    return nn.Sequential(layer)


def project():
    return Project(3, settings=Settings(2.0, ["a", "b"]), activation=torch.sin, b=1, a=(2, None))


def spectrum(x):
    return torch.from_numpy(scipy.fft.rfft(x.numpy(), axis=-1) * scipy.stats.norm.pdf(0.5))


def sourceless():
    scope = {}
    exec("def double(x):\n    return x * 2", scope)
    return scope["double"]


def with_sourceless_helper():
    helper = sourceless()

    def quadruple(x):
        return helper(helper(x))

    return quadruple


# Each with the shape of its input.
READABLE = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding="valid"), (5, 3, 7, 7)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(3, 4, 3, padding_mode="zeros"), (5, 3, 7)),
    "fused convolution": (
        lambda: fuse_conv_bn_eval(nn.Conv2d(3, 4, 3).eval(), nn.BatchNorm2d(4).eval()),
        (5, 3, 7, 7),
    ),
    "lstm": (lambda: First(nn.LSTM(4, 3, num_layers=2, batch_first=True, bidirectional=True)), (5, 6, 4)),
    "gru": (lambda: First(nn.GRU(4, 3, batch_first=True)), (5, 6, 4)),
    "rnn": (lambda: First(nn.RNN(4, 3, batch_first=True)), (5, 6, 4)),
    "attention": (Attend, (5, 6, 4)),
    "encoder": (encoder, (5, 6, 4)),
    "embedding": (Lookup, (5, 6)),
    "batch norm": (lambda: nn.BatchNorm1d(4).eval(), (5, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (5, 4)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.GELU()).eval(), (5, 4)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), (5, 4)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(), (5, 4)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (5, 4)),
    "pruned": (pruned, (5, 4)),
    "traced graph": (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), (5, 4)),
    "project": (project, (5, 4)),
    "function": (lambda: function, (5, 4)),
    "functions of SciPy": (lambda: spectrum, (5, 4)),
    "no source": (sourceless, (5, 4)),
    "helper without source": (with_sourceless_helper, (5, 4)),
}


def holding(value):
    module = nn.Linear(4, 3)
    module.kept = value
    return module


# Each with the name that the warning gives the place.
UNREADABLE = {
    "generator": (lambda: holding(i for i in range(3)), "kept"),
    "view of memory": (lambda: holding(memoryview(bytearray(3))), "kept"),
    "nested": (lambda: nn.Sequential(holding([{"deep": (i for i in ())}])), "0.kept[0]['deep']"),
}


def build(name):
    torch.manual_seed(0)
    builder = UNREADABLE[name][0] if name in UNREADABLE else READABLE[name][0]
    return builder()


def decorated(name):
    thing = build(name)
    return thing if hasattr(thing, "cache_instance") else torchcache(thing)


class Counter(logging.Handler):
    count = 0

    def emit(self, record):
        self.count += record.levelno >= logging.WARNING


def main():
    warnings.simplefilter("error")
    counter = Counter()
    logging.getLogger("torchcache2").handlers = [counter]
    found = {}
    for name in (*READABLE, *UNREADABLE):
        torch.manual_seed(0)
        counter.count = 0
        thing = decorated(name)
        found[name] = (thing.cache_instance.module_hash, counter.count)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
