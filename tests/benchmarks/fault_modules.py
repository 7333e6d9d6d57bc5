"""What the fault tests decorate, and the pairs of calls that torchcache 0.6.0 takes for one.

Functions return a new class at every call, because our decorator patches the class that it is given.
"""

import warnings

import torch
from torch import nn

import torchcache2
from tests.benchmarks.peers import torchcache


class Quiet:
    """A module whose warnings, errors in this suite, are its own affair."""

    def __init__(self, module):
        self.module = module

    def __call__(self, *args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.module(*args, **kwargs)


def theirs(cls, *args, **options):
    return Quiet(torchcache(**options)(cls)(*args))


def ours(cls, *args, **options):
    return torchcache2.torchcache(**options)(cls)(*args)


def pair(make):
    """A module cached by torchcache 0.6.0, and one of the same source cached by us."""
    return theirs(make()), ours(make())


def double():
    class Double(nn.Module):
        def forward(self, x):
            return x * 2 + 1

    return Double


def scaled():
    class Scaled(nn.Module):
        def __init__(self, weight=1.0, power=1):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(weight), requires_grad=False)
            self.power = power

        def forward(self, x):
            return x**self.power * self.weight

    return Scaled


def affine():
    class Affine(nn.Module):
        def forward(self, x, scale=1, shift=0):
            return x * scale + shift

    return Affine


def difference():
    class Difference(nn.Module):
        def forward(self, a, b=0, c=0):
            return a - b + 2 * c

    return Difference


def returning(function):
    """A class whose forward is `function(x)`."""

    def make():
        class Returning(nn.Module):
            def forward(self, x):
                return function(x)

        return Returning

    return make


def containing(child):
    """A class that applies `child()`."""

    def make():
        class Containing(nn.Module):
            def __init__(self):
                super().__init__()
                self.child = child().requires_grad_(False)

            def forward(self, x):
                return self.child(x)

        return Containing

    return make


def placed(value):
    x = torch.ones(4, 30)
    x[:, 7] = value
    return x


def unread():
    """An image batch, and one that differs in 14 of 15 values: the default reads the fifteenth."""
    image = torch.rand(2, 3, 224, 224) * 100
    edited = torch.zeros_like(image)
    edited.view(2, -1)[:, ::15] = image.view(2, -1)[:, ::15]
    return image, edited


def same_key_calls():
    """Name, class, and the arguments of two calls that differ: `(args, kwargs)` each."""
    x, a, b = torch.rand(3, 4, 30) * 1000
    image, edited = unread()
    return {
        "arguments 3, 5 and 5, 3": (affine, ((x, 3, 5), {}), ((x, 5, 3), {})),
        "arguments 2, 2 and 7, 7": (affine, ((x, 2, 2), {}), ((x, 7, 7), {})),
        "the same value for another keyword": (affine, ((x,), {"scale": 3}), ((x,), {"shift": 3})),
        "tensors a, b and b, a": (difference, ((a, b), {}), ((b, a), {})),
        "the same tensor for another keyword": (difference, ((a,), {"b": b}), ((a,), {"c": b})),
        "values moved by 15 places": (double, ((x,), {}), ((x.roll(15, 1),), {})),
        "the same values in another shape": (double, ((x,), {}), ((x.view(4, 5, 6),), {})),
        "the same values in another dtype": (double, ((x.round(),), {}), ((x.round().int(),), {})),
        "14 of 15 values of an image": (double, ((image,), {}), ((edited,), {})),
        "inf and 1e30": (double, ((placed(float("inf")),), {}), ((placed(1e30),), {})),
        "integers 2**24 and 2**24 + 1": (
            double,
            ((torch.full((4, 1), 2**24),), {}),
            ((torch.full((4, 1), 2**24 + 1),), {}),
        ),
    }


# What the forward returns, and its input: the peer gives back the input's dtype from the second call on.
LOST_DTYPES = {
    "float features of token ids": (returning(lambda ids: ids / 2), torch.arange(1, 13).view(4, 3)),
    "float64 of float32": (returning(lambda x: x.double() / 3), torch.arange(12.0).view(4, 3)),
    "a bool mask of floats": (returning(lambda x: x > 5), torch.arange(12.0).view(4, 3)),
    "complex of floats": (returning(lambda x: torch.complex(x, x + 1)), torch.arange(12.0).view(4, 3)),
}
