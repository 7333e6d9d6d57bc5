"""Lists, dicts and the like: what a forward leaves in them, and edits of them between two calls."""

import array
import collections
import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.outputs import bypasses, hits, warnings_in
from torchcache2 import torchcache

X = torch.arange(1.0, 13.0).view(4, 3)

SEEN = []
TABLE = {"calls": 0}
COUNT = 0
MEMO = {}
LARGE = list(range(6_000))


pytestmark = pytest.mark.usefixtures("without_grad")


@pytest.fixture(autouse=True)
def reset_globals():
    reset()


def reset():
    global COUNT
    SEEN.clear()
    MEMO.clear()
    TABLE.clear()
    TABLE["calls"] = COUNT = 0
    del LARGE[6_000:]


class Holder(nn.Module):
    """Holds something, and has a function change it before each output."""

    def __init__(self, held, change):
        super().__init__()
        self.held = held
        self.change = change

    def forward(self, x):
        return x * self.change(self.held)


class Box:
    def __init__(self):
        self.items = []
        self.count = 0


class Seen(list):
    pass


def filled(held):
    held[len(held)] = 1
    return len(held)


def counted(held):
    held["n"] += 1
    return held["n"]


def raised(held, index=0, by=1):
    held[index] += by
    return int(np.asarray(held[index]).astype(int))


def total(held):
    """A number that depends on everything in it."""
    parts = held.values() if isinstance(held, dict) else held
    return float(np.concatenate([*map(np.ravel, parts)]).sum()) + len(held)


def appended(held):
    held.append(1)
    return len(held)


def turned(held):
    """Pops the oldest entry, as memos of a fixed size do."""
    held.pop(next(iter(held)))
    held[max(held, default=0) + 1] = 1
    return next(iter(held))


CHANGES = {
    "list": (list, appended),
    "subclass": (lambda: Seen(), appended),
    "nested": (lambda: {"a": []}, lambda held: appended(held["a"])),
    "in a tuple": (lambda: ("a", []), lambda held: appended(held[1])),
    "in an object": (lambda: Box(), lambda held: appended(held.items)),
    "in a list of objects": (lambda: [Box()], lambda held: appended(held[0].items)),
    "dict": (dict, filled),
    "dict of counts": (lambda: {"n": 0}, counted),
    "large numbers": (lambda: {"n": 1e9}, counted),
    "OrderedDict": (lambda: collections.OrderedDict(), filled),
    "order": (
        lambda: collections.OrderedDict({2: 1, 3: 1, 5: 1}),
        lambda held: held.move_to_end(next(iter(held))) or next(iter(held)),
    ),
    "oldest": (lambda: {1: 1, 2: 1, 3: 1}, turned),
    "defaultdict": (lambda: collections.defaultdict(int), counted),
    "Counter": (lambda: collections.Counter(), counted),
    "set": (lambda: set(), lambda held: held.add(len(held)) or len(held)),
    "deque": (lambda: collections.deque(maxlen=100), appended),
    "bytearray": (lambda: bytearray(4), raised),
    "array of the standard library": (lambda: array.array("d"), appended),
    "array": (lambda: np.zeros(4), raised),
    "array of objects": (lambda: np.array([0, "a"], object), raised),
    "array of dates": (lambda: np.zeros(2, "M8[D]"), lambda h: raised(h, 0, np.timedelta64(1, "D"))),
    "array in a list": (lambda: [np.zeros(4)], lambda held: raised(held[0])),
    "large list": (lambda: list(range(3000)), lambda held: raised(held, -1)),
    "larger list": (lambda: [0] * 6_000, appended),
    "larger dict": (lambda: dict.fromkeys(range(6_000)), filled),
    "full deque": (lambda: collections.deque(range(6_000), maxlen=6_000), lambda h: h.append(1) or h[0]),
    "large array": (lambda: np.zeros(10_000), lambda held: raised(held, -1)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CHANGES)
def test_a_forward_that_changes_what_it_holds_is_passed_through(name):
    make, change = CHANGES[name]
    plain = Holder(make(), change)
    module = torchcache(Holder(make(), change))
    for x in (X, X, X[:2], torch.cat([X, X])):
        assert torch.equal(module(x), plain(x))
    assert bypasses(module) == {"state": 18} and hits(module) == 0
    assert repr(module.held) == repr(plain.held) or isinstance(plain.held, (Box, list))


def test_globals_closures_defaults_and_class_attributes_count_too():
    kept = []
    log = kept.append

    class Shared(nn.Module):
        names = []  # noqa: RUF012

        def forward(self, x):
            self.names.append("a")
            return x * len(self.names)

    def of_itself(x):
        function.seen.append(1)
        return x * len(function.seen)

    def through_method(x):
        log(1)
        return x * 2

    def to_default(x, seen=[]):  # noqa: B006
        return x * appended(seen)

    for forward in (
        Shared(),
        lambda x: x * appended(kept),
        lambda x: x * appended(SEEN),
        lambda x: x * raised(TABLE, "calls"),
        of_itself,
        through_method,
        to_default,
    ):
        function = torchcache(forward)
        function.seen = []
        kept.clear()
        outputs = [function(X) for _ in range(3)]
        assert [int(y[0, 0]) for y in outputs] == [1, 2, 3] or (forward is through_method and len(kept) == 3)
        assert hits(function) == 0
        # A default is an argument: it is part of the key, and changed in place it is a changed input.
        assert bypasses(function) == {"state": 12} or forward is to_default


def test_hooks_that_collect():
    """Those of the module itself run at every call, outside of the forward; those of submodules within."""
    outputs, inner = [], []
    module = torchcache(nn.Sequential(nn.Tanh()))
    module.register_forward_hook(lambda module, args, output: outputs.append(output))
    for _ in range(3):
        module(X)
    assert len(outputs) == 3 and hits(module) == 8 and bypasses(module) == {}

    def collect(module, args, output):
        inner.append(output)

    module[0].register_forward_hook(collect)
    for _ in range(3):
        module(X)
    assert len(inner) == 3 and hits(module) == 8 and bypasses(module) == {"state": 12}


FEATURES = """
import torch
from torch import nn
class Features(nn.Module):
    '''Collects what its layers return, by hooks or by itself.'''
    def __init__(self, hook):
        super().__init__()
        self.net = nn.Sequential(nn.Tanh(), nn.Sigmoid())
        self.features, self.outputs = [], {}
        for name, layer in self.net.named_children():
            layer.register_forward_hook(hook(self, name))
    def keep(self, module, args, output):
        self.features.append(output)
    def forward(self, x):
        {body}
"""
CLEARED, FOUND = "self.features.clear()\nself.outputs.clear()\n", "[*self.features, *self.outputs.values()]"
RETURNED = {
    "cleared": f"{CLEARED}self.net(x)\nreturn {FOUND}",
    "assigned": f"self.features, self.outputs = [], {{}}\nself.net(x)\nreturn {FOUND}",
    "emptied": f"self.net(x)\nfound = {FOUND}\n{CLEARED}return found",
}
READ = {
    "unread": f"{CLEARED}return [self.net(x), torch.tanh(x)][::-1]",
    "what is left of the call before": "count = len(self.features) + len(self.outputs)\n"
    f"{CLEARED}self.net(x)\nreturn [one + count for one in {FOUND}]",
    "what is left of earlier calls": f"self.net(x)\nreturn {FOUND}[-2:]",
}


def features(load, body):
    return load("features_of_test", FEATURES.replace("{body}", body.replace("\n", "\n        "))).Features


def method(module, name):
    return module.keep


def appending(module, name):
    return lambda layer, args, output: module.features.append(output)


def setting(module, name):
    return lambda layer, args, output: module.outputs.__setitem__(name, output)


def naming(module, name):
    def hook(layer, args, output):
        module.outputs[name] = output

    return hook


HOOKS = [method, appending, setting, naming]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", RETURNED)
def test_features_that_a_forward_collects_and_returns_are_no_state(name, hook, load):
    module = torchcache(features(load, RETURNED[name])(hook).eval())
    for x in (X, X, X + 1, X[:2]):
        first, second = module(x)
        assert torch.equal(first, x.tanh()) and torch.equal(second, x.tanh().sigmoid())
    assert bypasses(module) == {} and hits(module) == 6


@pytest.mark.one_in(3)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", READ)
def test_features_that_others_may_read_are_state(name, hook, load):
    make = features(load, READ[name])
    plain, module = make(hook).eval(), torchcache(make(hook).eval())
    for x in (X, X + 1, X):
        assert all(map(torch.equal, module(x), plain(x)))
        both = [*module.features, *module.outputs.values()], [*plain.features, *plain.outputs.values()]
        assert len(both[0]) == len(both[1]) and all(map(torch.equal, *both))
    assert bypasses(module) == {"state": 12}


@pytest.mark.parametrize("make", [dict, collections.OrderedDict, lambda: collections.defaultdict(float)])
def test_features_in_closures_are_no_state(make):
    found, net = make(), nn.Sequential(nn.Tanh(), nn.Sigmoid())

    def hook(layer, args, output):
        found[type(layer).__name__] = output

    for layer in net:
        layer.register_forward_hook(hook)

    @torchcache
    def function(x):
        found.clear()
        net(x)
        return list(found.values())

    for x in (X, X, X + 1):
        first, second = function(x)
        assert torch.equal(first, x.tanh()) and torch.equal(second, x.tanh().sigmoid())
    # The default of a dict is not its content.
    assert bool(bypasses(function)) == (type(found) is collections.defaultdict)


# Memos: the first call fills them.


class Rotary(nn.Module):
    def __init__(self, memo):
        super().__init__()
        self.memo = memo

    def forward(self, x):
        if x.shape[1] not in self.memo:
            self.memo[x.shape[1]] = torch.arange(1.0, x.shape[1] + 1)
        return x * self.memo[x.shape[1]]


@pytest.mark.parametrize("make", [dict, collections.OrderedDict, lambda: MEMO])
def test_a_memo_is_a_bypass_only_when_it_is_filled(make):
    module = torchcache(Rotary(make()))
    wide = torch.arange(20.0).view(4, 5)
    for _ in range(3):
        assert torch.equal(module(X), X * torch.arange(1.0, 4.0))
    assert bypasses(module) == {"state": 4} and hits(module) == 4
    for _ in range(3):
        assert torch.equal(module(wide), wide * torch.arange(1.0, 6.0))
    assert bypasses(module) == {"state": 8} and hits(module) == 8
    for _ in range(2):
        assert torch.equal(module(X), X * torch.arange(1.0, 4.0))
    assert bypasses(module) == {"state": 8} and hits(module) == 12


# What a part of the batch has left behind is taken back before the forward runs for all.


def state_of_everything(module):
    held = [module.held, module.box.items, module.box.count, SEEN, TABLE, COUNT, LARGE[6_000:]]
    return copy.deepcopy(held)


class Late(nn.Module):
    """Leaves no trace, until it meets a large number."""

    def __init__(self):
        super().__init__()
        self.held = {
            "list": [[1], [2]],
            "dict": {1: "a", 2: "b", 3: "c"},
            "ordered": collections.OrderedDict({1: "a", 2: "b"}),
            "set": {3, 1, 2},
            "deque": collections.deque([1, 2, 3], maxlen=3),
            "bytes": bytearray(b"abc"),
            "array": np.arange(3.0),
            "numbers": array.array("d", [1.0]),
        }
        self.box = Box()

    def forward(self, x):
        global COUNT
        if bool((x > 50).any()):
            held = self.held
            held["list"][1].append(len(x))
            held["dict"].pop(next(iter(held["dict"])))
            held["dict"][len(held["dict"]) + 10] = "d"
            held["ordered"].move_to_end(next(iter(held["ordered"])))
            held["set"].add(len(held["set"]) + 10)
            held["deque"].append(len(x))
            held["bytes"].append(100)
            held["array"][0] += 1
            held["numbers"].append(3.0)
            self.box.items.append(len(x))
            self.box.count += 1
            SEEN.append(len(x))
            TABLE["calls"] += 1
            LARGE.append(len(x))
            COUNT += 1
        return x * 2 + COUNT


def test_the_caller_sees_what_one_plain_forward_does():
    batches = (X, torch.cat([X[:2], X[:2] + 100, X[2:]]), X, torch.cat([X, X + 200]))
    expected, plain = [], Late()
    for x in batches:
        expected.append((plain(x), state_of_everything(plain)))
    outputs = [output for output, _ in expected]
    reset()
    module = torchcache(Late())
    for x, output, (_, state) in zip(batches, outputs, expected, strict=True):
        assert torch.equal(module(x), output)
        assert repr(state_of_everything(module)) == repr(state)
    assert bypasses(module)["state"] >= 14


def test_an_attribute_beside_one_that_is_only_written_is_noticed():
    class Writing(nn.Module):
        factor = 1

        def forward(self, x):
            self.seen = len(x)
            return x * self.factor

    module = torchcache(nn.Sequential(Writing(), Writing()))
    assert torch.equal(module(X), X) and torch.equal(module(X), X)
    module[0].factor = 3
    assert torch.equal(module(X), X * 3)
    assert hits(module) == len(X) and bypasses(module) == {}


# Edits between two calls.


class Scaled(nn.Module):
    """What peft's layers look like: a dict of numbers."""

    def __init__(self):
        super().__init__()
        self.scaling = {"default": 2.0}
        self.factors = [1.0, 2.0]
        self.nested = {"a": [1, {"b": (3, [4])}]}
        self.names = collections.deque(["one"])
        self.kinds = {"plain"}
        self.raw = bytearray(b"\x01")
        self.array = np.ones(3)
        self.numbers = array.array("d", [1.0])
        self.ordered = collections.OrderedDict({"a": 2, "b": 3})
        self.box = Box()
        self.box.items = [1]
        self.parts = [nn.Identity()]

    def forward(self, x):
        text = repr([self.scaling, self.factors, self.nested, self.names, self.kinds, self.raw, self.ordered])
        text += repr([self.array.tolist(), self.numbers, self.box.items, list(self.ordered)])
        number = sum(i * ord(letter) for i, letter in enumerate(text))
        for part in self.parts:
            x = part(x)
        return x * number + len(text)


EDITS = {
    "scale": lambda m: m.scaling.__setitem__("default", 9.0),
    "another scale": lambda m: m.scaling.__setitem__("other", 2.0),
    "key": lambda m: m.scaling.__setitem__("Default", m.scaling.pop("default")),
    "number": lambda m: m.factors.__setitem__(0, 5.0),
    "kind of number": lambda m: m.nested["a"].__setitem__(0, 1.0),
    "bool": lambda m: m.nested["a"].__setitem__(0, True),
    "sign of zero": lambda m: m.factors.__setitem__(slice(None), [0.0, -0.0]),
    "swapped": lambda m: m.factors.reverse(),
    "appended": lambda m: m.factors.append(3.0),
    "deep": lambda m: m.nested["a"][1]["b"][1].append(5),
    "deque": lambda m: m.names.appendleft("zero"),
    "set": lambda m: m.kinds.add("other"),
    "bytearray": lambda m: m.raw.append(2),
    "array of the standard library": lambda m: m.numbers.__setitem__(0, 7.0),
    "array": lambda m: m.array.__setitem__(1, 7.0),
    "shape of an array": lambda m: setattr(m.array, "shape", (3, 1)),
    "order": lambda m: m.ordered.move_to_end("a"),
    "in an object": lambda m: m.box.items.append(2),
    "a module in a list": lambda m: m.parts.__setitem__(0, nn.Tanh()),
    "cleared": lambda m: m.scaling.clear(),
}


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:Setting the shape")
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_a_small_container_is_noticed_at_the_next_call(name):
    plain, module = Scaled(), torchcache(Scaled())
    before = module(X)
    first = module.cache_instance.module_hash
    EDITS[name](module)
    EDITS[name](plain)
    assert torch.equal(module(X), plain(X)), name
    assert module.cache_instance.module_hash != first
    assert not torch.equal(before, plain(X))
    module(X)
    assert bypasses(module) == {} and hits(module) == 4


LARGER = {
    "array": (lambda: np.ones(20_000), lambda held: held.__imul__(2)),
    "array of columns": (lambda: np.asfortranarray(np.ones((200, 200))), lambda held: held.__imul__(2)),
    "strided array": (lambda: np.ones((400, 400))[::2, ::3], lambda held: held.__imul__(2)),
    "last row": (lambda: np.ones((200, 200)), lambda held: held.__setitem__(-1, 7.0)),
    "array in a dict": (lambda: {1: np.ones(20_000)}, lambda held: held[1].fill(2)),
    "list": (lambda: [1.0] * 1000, appended),
    "subclass": (lambda: Seen([1.0] * 1000), appended),
    "list of arrays": (lambda: [np.ones(3) for _ in range(1000)], lambda held: held.append(np.ones(3))),
    "dict": (lambda: dict.fromkeys(range(1000), 1.0), filled),
    "set": (lambda: set(range(1000)), lambda held: held.add(-1)),
    "bytes": (lambda: bytearray(20_000), appended),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", LARGER)
def test_the_size_of_a_larger_container_and_the_ends_of_an_array_are_compared_at_every_call(name):
    make, edit = LARGER[name]
    module = torchcache(probe=False)(Holder(make(), total))
    for _ in range(2):
        for _ in range(2):
            assert torch.equal(module(X), X * total(module.held))
        edit(module.held)
    assert bypasses(module) == {} and hits(module) == 8


def test_a_proxy_of_a_container_is_unreadable_as_its_edits_are_not_noticed(log):
    wrapt = pytest.importorskip("wrapt")
    module = torchcache(Holder(wrapt.ObjectProxy([1.0]), total))
    module(X)
    assert "cannot read held" in " ".join(warnings_in(log))


def test_a_large_list_that_was_edited_has_nothing_stored_under_its_old_content():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = list(range(1000))

        def forward(self, x):
            return x * self.table[500]

    module = torchcache(probe=False)(Large())
    module(X)
    module.table[500] = 7
    assert torch.equal(module(X[:1]), X[:1] * 500)  # a hit: larger lists are looked at around a forward
    for _ in range(2):
        assert torch.equal(module(X + 1), (X + 1) * 7)
    assert torch.equal(module(X), X * 7)
    assert bypasses(module) == {"state": 4}


def test_a_list_that_changes_while_it_is_read_is_read_again():
    class Tripwire:
        __slots__ = ("value",)
        held = None

        def __getattribute__(self, name):
            if name == "value" and Tripwire.held:
                Tripwire.held.pop().append(5.0)
            return object.__getattribute__(self, name)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = [2.0]
            self.z = Tripwire()
            self.z.value = 1

        def forward(self, x):
            return x * self.a[-1]

    module = torchcache(Module())
    holder = [module.a]
    Tripwire.held = holder
    first = module.cache_instance.module_hash if hasattr(module, "cache_instance") else None
    assert holder == []
    assert module.cache_instance.module_hash != first
    assert torch.equal(module(X), X * 5)


def test_a_container_that_holds_the_module_does_not_keep_it():
    module = torchcache(Scaled())
    module.scaling["inner"] = [1, 2]
    module(X)
    gone = weakref.ref(module)
    del module
    assert gone() is None, gc.get_referrers(gone())
