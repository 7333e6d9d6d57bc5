"""What `explain` says first, what it puts in one line, and what it recognises: bypasses, dtypes, padding."""

import pytest
import torch
from torch import nn

from torchcache2 import torchcache

X = torch.arange(12.0).view(3, 4)


def lines(module):
    return module.cache_instance.explain().splitlines()


def frozen(*layers, **options):
    return torchcache(**options)(nn.Sequential(*layers).eval().requires_grad_(False))


# Whether the last call was cached at all


def test_a_call_in_training_mode_is_said_not_to_be_cached(log):
    net = frozen(nn.Linear(4, 4), nn.Dropout())
    net(X)
    net.train()
    net(X)
    first, *more = lines(net)
    assert first == (
        "not cached: training: Dropout drops out at random; call .eval() first; "
        "a trainer's model.train() may have undone it"
    )
    assert more == ["training: False → True", "training 0: False → True", "training 1: False → True"]
    net.eval()
    net(X)
    assert not lines(net)[0].startswith("not cached")
    assert any("a trainer's model.train() may have undone it" in record.getMessage() for record in log)


def test_a_call_that_raises_is_not_what_the_call_before_was():
    net = frozen(nn.Linear(4, 4), nn.Dropout())
    net.train()
    net(X)
    net.eval()
    with pytest.raises(RuntimeError, match="shapes"):
        net(torch.ones(3, 5))
    assert not lines(net)[0].startswith("not cached")


LAYER = nn.Linear(4, 4)


@pytest.mark.parametrize("where", ["0.weight", "global LAYER.weight", "closure inner.bias"])
def test_calls_that_were_never_cached_have_one_line_with_the_path_of_what_requires_grad(where):
    inner = nn.Linear(4, 4)
    inner.weight.requires_grad_(False)
    cached = {
        "0": lambda: frozen(LAYER).requires_grad_(True),
        "global": lambda: torchcache(lambda x: LAYER(x)),
        "closure": lambda: torchcache(lambda x: inner(x)),
    }[where.partition(" ")[0].partition(".")[0]]()
    cached(X)
    (line,) = lines(cached)
    assert line.startswith(f"not cached: grad: grad mode is on and {where} requires grad; ")


@torchcache
def noisy(x):
    return x + torch.rand(())


@torchcache
def counting(x, seen=[]):  # noqa: B006
    seen.append(len(x))
    return x * 2


@torchcache
def unbatched(x):
    return x.sum()


@torchcache
def scaled(x, how):
    return x * 2


CALLS = {
    "random": (noisy, (X,)),
    "state": (counting, (X,)),
    "output": (unbatched, (X,)),
    "argument": (scaled, (X, object())),
}


@pytest.mark.parametrize("reason", CALLS)
def test_a_reason_is_told_however_often_a_call_was_not_cached(reason):
    function, args = CALLS[reason]
    function(*args)
    found = lines(function)
    assert found[0].startswith(f"not cached: {reason}: ") and len(found[0]) > 30
    for _ in range(20):  # soon such calls are spared the attempt
        function(*args)
    assert lines(function)[0].startswith(f"not cached: {reason}: ")
    assert "nothing but the items differs" not in "\n".join(lines(function))


def test_a_cache_that_is_off_says_so(monkeypatch):
    net = frozen(nn.Linear(4, 4), enabled=False)
    net(X)
    assert lines(net) == ["not cached: enabled=False"]
    net = frozen(nn.Linear(4, 4))
    net(X)
    monkeypatch.setenv("TORCHCACHE_DISABLE", "1")
    assert lines(net)[0] == "not cached: TORCHCACHE_DISABLE is set"
    monkeypatch.delenv("TORCHCACHE_DISABLE")
    assert not lines(net)[0].startswith("not cached")
    net.cache_instance.close()
    assert lines(net)[0] == "not cached: the cache is closed"


# Equal lines


def layers(count):
    return [nn.Linear(4, 4) for _ in range(count)]


def test_only_what_changed_alike_is_in_one_line():
    net = frozen(*layers(6))
    for number, layer in enumerate(net):
        layer.heads, layer.number = 2, number
    net(X)
    for number, layer in enumerate(net):
        layer.heads, layer.number = 4, number * 10 + 7
        layer.bias.data += 1
    net(X)
    assert lines(net) == [
        "attribute 0.heads: 2 → 4, and 5 more: 1.heads, 2.heads, …",
        *[f"attribute {number}.number: {number} → {number * 10 + 7}" for number in range(6)],
        "weights: 0.bias changed, and 5 more: 1.bias, 2.bias, …",
    ]


# Dtypes and shapes of weights


def test_another_dtype_of_weights_is_named():
    net = frozen(*layers(8))
    net(X)
    net.half()
    net(X.half())
    assert lines(net) == ["weights: 0.bias: float32 → float16, and 15 more: 0.weight, 1.bias, …"]
    net[0].double()
    net[0].bias.data += 1
    net.cache_instance.module_hash  # noqa: B018
    assert lines(net) == ["weights: 0.bias: float16 → float64", "weights: 0.weight: float16 → float64"]


def test_another_shape_of_weights_is_named():
    net = frozen(nn.Linear(4, 4))
    net(X)
    net[0].weight.data = torch.ones(2, 4)
    net[0].bias.data = torch.ones(2, dtype=torch.float64)
    net.cache_instance.module_hash  # noqa: B018
    assert lines(net) == [
        "weights: 0.bias: float32 (4,) → float64 (2,)",
        "weights: 0.weight: float32 (4, 4) → float32 (2, 4)",
    ]


# Padding


@torchcache
def embedded(ids, mask=None):
    return ids.float() if mask is None else (ids.float().unsqueeze(1) * mask).sum(1)


def ids(length, dtype=torch.int64):
    return torch.ones(2, length, dtype=dtype)


LENGTHS = {
    "a length": ((ids(7),), (ids(9),), ["items of ids: int64 (7,) → int64 (9,): another padding?"]),
    "one length, in several places": (
        (ids(7), torch.ones(2, 7, 7)),
        (ids(9), torch.ones(2, 9, 9)),
        [
            "items of ids: int64 (7,) → int64 (9,): another padding?",
            "items of mask: float32 (7, 7) → float32 (9, 9): another padding?",
        ],
    ),
    "a dtype, too": ((ids(7),), (ids(9, torch.int32),), ["items of ids: int64 (7,) → int32 (9,)"]),
    "a dtype": ((ids(7),), (ids(7, torch.int32),), ["items of ids: int64 (7,) → int32 (7,)"]),
    "dimensions": ((ids(7),), (ids(7)[:, None],), ["items of ids: int64 (7,) → int64 (1, 7)"]),
    "the first of two": (
        (torch.ones(2, 7, 3),),
        (torch.ones(2, 9, 3),),
        ["items of ids: float32 (7, 3) → float32 (9, 3): another padding?"],
    ),
    "two lengths": (
        (torch.ones(2, 7, 3),),
        (torch.ones(2, 9, 4),),
        ["items of ids: float32 (7, 3) → float32 (9, 4)"],
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_another_length_may_be_another_padding(name):
    before, now, expected = LENGTHS[name]
    embedded(*before)
    embedded(*now)
    assert lines(embedded) == expected


# A hint where nothing is ever found


def hints(log):
    return [(one.levelname, one.getMessage()) for one in log if "items was found" in one.getMessage()]


MANY = torch.arange(2400.0).view(600, 4)


def test_a_hint_says_once_why_nothing_is_found(log):
    stepped = torchcache(lambda x, step: x + step)
    for step in range(6):
        stepped(MANY, step)
    ((level, message),) = hints(log)
    assert level == "WARNING"
    assert message.endswith("none of the first 1,200 items was found; explain() says: argument step: 0 → 1")


def test_a_first_epoch_is_no_reason_to_warn(log):
    net = frozen(nn.Linear(4, 4))
    for step in range(6):
        net(MANY + 10_000 * step)
    assert [level for level, _ in hints(log)] in ([], ["INFO"])


def test_where_something_was_found_there_is_no_hint(log):
    stepped = torchcache(lambda x, step: x + step)
    stepped(X, 0), stepped(X, 0)
    for step in range(6):
        stepped(MANY, step)
    assert hints(log) == []


def test_a_hint_names_padding_where_it_leaves_too_few_found(log):
    lengths, generator = torch.arange(400) % 23 + 5, torch.Generator().manual_seed(0)
    net = torchcache(lambda ids: ids.sum(1))
    for _ in range(8):
        for positions in torch.randperm(400, generator=generator).split(8):
            longest = int(lengths[positions].max())
            net((torch.arange(longest) < lengths[positions, None]) * (1.0 + positions[:, None]))
    said = [one.getMessage() for one in log if "items were found" in one.getMessage()]
    assert len(said) == 1 and "to a multiple (docs/recipes/padding.md)" in said[0]
