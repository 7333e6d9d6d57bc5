"""Every change of a module is noticed at the very next call."""

import contextlib
import copy
import dataclasses
import gc
import io
import os
import sys
import types
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tests.helpers.outputs import hits
from torchcache2 import torchcache
from torchcache2.identity import guard

FACTOR = 2


pytestmark = pytest.mark.usefixtures("without_grad")


def equal(first, second):
    return first.dtype == second.dtype and torch.equal(first, second)


def plain(module, *args):
    """The output without the cache, which does not even see the call."""
    with mock.patch.dict(os.environ, TORCHCACHE_DISABLE="1"):
        return module(*args)


class Config:
    def __init__(self, rate=1):
        self.rate = rate
        self.inner = types.SimpleNamespace(rate=1)


@dataclasses.dataclass
class Options:
    rate: int = 1


class _Slotted:
    __slots__ = ("__factor", "rate")

    def __init__(self):
        self.rate = self.__factor = 1

    def total(self):
        return self.rate * self.__factor


def helper(x, power=1, *, root=1):
    return x * FACTOR * power / root


helper.offset = 1


def other_helper(x, power=1, *, root=1):
    return x * 5


other_helper.offset = 1


def adds(number):
    return lambda x: x + number


class Block(nn.Module):
    offset = 1

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rate = 1

    def forward(self, x):
        return torch.tanh(self.layer(x)) * self.rate + self.offset


class OtherBlock(Block):
    def forward(self, x):
        return -super().forward(x)


class Net(nn.Module):
    """Its output tells of every part of it."""

    offset = 1

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.first.weight[0, 0] = 0.5
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Block())
        self.parts = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("shift", torch.ones(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.rate = 1
        self.extra = 1
        self.config = Config()
        self.options = Options()
        self.slotted = _Slotted()
        self.loose = torch.ones(4)
        self.listed = [1, torch.ones(4), {"a": torch.ones(4)}]
        self.step = adds(1)

    def helped(self, x):
        return x * 3

    def forward(self, x):
        x = self.body(self.first(x.to(self.first.weight.dtype))) + self.shift
        for part in self.parts:
            x = x + part(x)
        x = x * self.scale * self.loose * self.listed[1] * self.listed[2]["a"]
        x = x * self.config.rate * self.config.inner.rate * self.options.rate * self.slotted.total()
        x = self.step(helper(x)) * getattr(self, "extra", 7) + getattr(self, "added", 0)
        x = x + getattr(self.config, "bonus", 0) + helper.offset + round(3.7)
        # 1 and 1.0 are different numbers.
        x = x + len(str(self.rate)) * self.listed[0]
        return self.helped(x) * (-1 if self.training else 1) + self.offset


class OtherNet(Net):
    def helped(self, x):
        return x * 4


def cached_class():
    return torchcache(type("Cached", (Net,), {}))().eval()


def cached_instance():
    return torchcache(Net().eval())


# Changes of a module: each returns what takes it back.

MISSING = object()


def found(net, path):
    """What has the last name of a path, such as "net.first.weight" or "Net.offset"; and that name."""
    first, *names, last = path.split(".")
    one = net if first == "net" else sys.modules[__name__] if first == "globals" else globals()[first]
    for name in names:
        is_item = isinstance(one, (tuple, list, dict))
        one = one[int(name) if name.isdigit() else name] if is_item else getattr(one, name)
    return one, last


def assigns(path, value):
    """Assign what a function makes of the old value; without one, delete."""

    def change(net):
        owner, name = found(net, path)
        fields = vars(owner) if isinstance(owner, type) else {name: getattr(owner, name, MISSING)}
        old = fields.get(name, MISSING)
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value(old))
        return lambda: delattr(owner, name) if old is MISSING else setattr(owner, name, old)

    return change


def edits(path, edit):
    """Edit a tensor."""

    def change(net):
        owner, name = found(net, path)
        tensor = owner[int(name) if name.isdigit() else name] if "listed" in path else getattr(owner, name)
        kept = tensor.clone()
        edit(tensor)
        return lambda: tensor.copy_(kept)

    return change


def with_state(change):
    """A change that loading the old state takes back."""

    def changed(net):
        old = copy.deepcopy(net.state_dict())
        change(net)
        return lambda: net.float().load_state_dict(old)

    return changed


def loads(**options):
    def change(net):
        net.load_state_dict({name: tensor + 1 for name, tensor in net.state_dict().items()}, **options)

    return change


def vector_into_parameters(net):
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector * 2, net.parameters())
    return lambda: nn.utils.vector_to_parameters(vector, net.parameters())


def swapped_submodules(net):
    net.first, net.parts[0] = net.parts[0], net.first
    return lambda: swapped_submodules(net)


def removed_submodule(net):
    old = net.parts.pop(0)
    return lambda: net.parts.append(old)


def renamed_attribute(net):
    net.added = net.extra
    del net.extra
    return lambda: (setattr(net, "extra", net.added), delattr(net, "added"))


def method_on_the_instance(net):
    net.helped = types.MethodType(OtherNet.helped, net)
    return lambda: delattr(net, "helped")


def parametrisation(net):
    nn.utils.parametrize.register_parametrization(net.first, "weight", nn.Tanh())
    return lambda: nn.utils.parametrize.remove_parametrizations(net.first, "weight", leave_parametrized=False)


def double(module, args, output):
    return output * 2


CHANGES = {
    "weight": edits("net.first.weight", lambda w: w.mul_(2)),
    "one element": edits("net.body.2.layer.weight", lambda w: w[2].__setitem__(3, 1)),
    "data": edits("net.body.0.weight", lambda w: w.data.mul_(2)),
    "first element of data": edits("net.first.weight", lambda w: w.data[0].__setitem__(0, 3.0)),
    "numpy": edits("net.first.weight", lambda w: w.numpy().fill(1)),
    "buffer": edits("net.shift", lambda b: b.zero_()),
    "loose tensor": edits("net.loose", lambda t: t.mul_(2)),
    "listed tensor": edits("net.listed.1", lambda t: t.mul_(2)),
    "vector into parameters": vector_into_parameters,
    "loaded state": with_state(loads()),
    "assigned state": with_state(loads(assign=True)),
    "in double": with_state(lambda net: net.double()),
    "new data": assigns("net.first.weight.data", lambda _: torch.ones(4, 4)),
    "transposed data": assigns("net.first.weight.data", lambda d: d.t()),  # the same storage
    "shifted data": assigns("net.shift.data", lambda _: torch.arange(8.0)[4:]),
    "parameter": assigns("net.scale", lambda _: nn.Parameter(torch.full((4,), 2.0))),
    "parameter of a submodule": assigns("net.first.weight", lambda _: nn.Parameter(torch.ones(4, 4))),
    "no parameter": assigns("net.first.bias", lambda _: None),
    "another buffer": assigns("net.shift", lambda _: torch.zeros(4)),
    "submodule": assigns("net.first", lambda _: nn.Linear(4, 4)),
    "submodule by index": assigns("net.body.1", lambda _: nn.Sigmoid()),
    "appended submodule": lambda net: net.parts.append(nn.Linear(4, 4)) and (lambda: net.parts.pop(-1)),
    "removed submodule": removed_submodule,
    "swapped submodules": swapped_submodules,
    "attribute": assigns("net.extra", lambda _: 2),
    "added attribute": assigns("net.added", lambda _: 1),
    "removed attribute": assigns("net.extra", None),
    "renamed attribute": renamed_attribute,
    "attribute of another type": assigns("net.rate", lambda _: 1.0),
    "another list": assigns("net.listed", lambda old: [2, *old[1:]]),
    "function": assigns("net.step", lambda _: adds(2)),
    "closure": assigns("net.step.__closure__.0.cell_contents", lambda _: 2),
    "config": assigns("net.config.rate", lambda _: 2),
    "added to a config": assigns("net.config.bonus", lambda _: 1),
    "another config": assigns("net.config", lambda _: Config(2)),
    "field of a dataclass": assigns("net.options.rate", lambda _: 2),
    "slot": assigns("net.slotted.rate", lambda _: 2),
    "private slot": assigns("net.slotted._Slotted__factor", lambda _: 2),
    "hook": lambda net: net.first.register_forward_hook(double).remove,
    "prehook": lambda net: net.body[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,)).remove,
    "hook of the root": lambda net: net.register_forward_hook(double).remove,
    "global hook": lambda net: register_module_forward_hook(double).remove,
    "global prehook": lambda net: register_module_forward_pre_hook(lambda _, args: (args[0] * 1.5,)).remove,
    "training mode": lambda net: net.train() and net.eval,
    "training mode by assignment": assigns("net.training", lambda _: True),
    "global number": assigns("globals.FACTOR", lambda _: 3),
    "global function": assigns("globals.helper", lambda _: other_helper),
    # As reloading in a notebook does.
    "code of a global function": assigns("helper.__code__", lambda _: other_helper.__code__),
    "defaults of a global function": assigns("helper.__defaults__", lambda _: (2,)),
    "keyword defaults of a global function": assigns("helper.__kwdefaults__", lambda _: {"root": 2}),
    "attribute of a global function": assigns("helper.offset", lambda _: 2),
    "global that hides a builtin": assigns("globals.round", lambda _: lambda number: 9),
    "class attribute": assigns("Net.offset", lambda _: 2),
    "class attribute of a subclass": assigns("net.__class__.offset", lambda _: 3),
    "method of a class": assigns("Net.helped", lambda _: OtherNet.helped),
    "method on the instance": method_on_the_instance,
    "class of a submodule": assigns("net.body.2.__class__", lambda _: OtherBlock),
    "class of the module": assigns("net.__class__", lambda old: type("Other", (old,), dict(vars(OtherNet)))),
    "parametrisation": parametrisation,
}


def assert_noticed_and_no_rows_lost(make, change):
    net, x = make(), torch.rand(6, 4)
    before = plain(net, x)
    assert equal(net(x), before)
    assert equal(net(x), before)
    assert hits(net) == 6
    with contextlib.ExitStack() as stack:
        stack.callback(change(net))
        changed = plain(net, x)
        assert not equal(changed, before), "the change does not show, so that nothing is tested"
        assert equal(net(x), changed)
        assert hits(net) == 6
        assert equal(net(x), changed)
        assert hits(net) == 12
    assert equal(plain(net, x), before)
    assert equal(net(x), before)
    assert hits(net) == 18


@pytest.mark.parametrize("make", [cached_class, cached_instance])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.one_in(6)
@pytest.mark.cpu_only
def test_a_change_is_noticed_at_the_next_call_and_rows_are_not_lost(change, make):
    assert_noticed_and_no_rows_lost(make, CHANGES[change])


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd fused": (torch.optim.SGD, {"fused": True}),
    "adam": (torch.optim.Adam, {}),
    "adam fused": (torch.optim.Adam, {"fused": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
}


@pytest.fixture(params=OPTIMIZERS)
def optimizer(request):
    kind, options = OPTIMIZERS[request.param]
    return lambda parameters: kind(list(parameters), 0.1, **options)


def test_an_optimizer_step_is_noticed(optimizer):
    net, x = cached_class(), torch.rand(6, 4)
    stepper = optimizer(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = net(x)
    for _ in range(3):
        stepper.step()
        expected = plain(net, x)
        assert not equal(expected, before)
        assert equal(net(x), expected)
        assert equal(net(x), expected)
        before = expected
    assert hits(net) == 18


class Rows(nn.Module):
    """The rows of a table too large to be looked at in every call."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(400, 32)

    def forward(self, rows):
        return self.table(rows)


@pytest.mark.parametrize("called", ["before", "between"])
def test_a_step_that_moves_few_weights_is_noticed(optimizer, called):
    net = torchcache(Rows())
    stepper = optimizer(net.parameters())
    rows = torch.tensor([300, 310, 320])
    for _ in range(3):
        before = net(rows)
        assert equal(net(rows), before)
        with torch.enable_grad():
            loss = net(rows).sum()
        if called == "between":  # after the bypass, before the step
            assert equal(net(rows), before)
        loss.backward()
        stepper.step()
        expected = plain(net, rows)
        assert not equal(expected, before)
        assert equal(net(rows), expected)


def test_code_that_is_reloaded_in_place_is_used_and_noticed():
    # As notebooks do: the function stays, and gets the code and attributes of the new one.
    class Double(nn.Module):
        def forward(self, x):
            return x * 2

    class Triple(nn.Module):
        def forward(self, x):
            return x * 3

    net, x = torchcache(Double)(), torch.rand(6, 4)
    assert equal(net(x), x * 2)
    old, new = Double.forward, torchcache(Triple).forward
    old.__code__ = new.__code__
    vars(old).update(vars(new))
    assert equal(plain(net, x), x * 3)
    assert equal(net(x), x * 3)
    assert hits(net) == 0


class Signed(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (-1 if self.training else 1)


class Limits:
    top = 1


WEIGHTS = Signed(4, 4).eval().requires_grad_(False)
SETTINGS = Config()


def cached_function():
    rate = 1

    @torchcache
    def function(x):
        return helper(WEIGHTS(x)) * SETTINGS.rate * rate * Limits.top + helper.offset + round(2.2)

    return function


OF_FUNCTIONS = {
    "global module": edits("globals.WEIGHTS.weight", lambda w: w.mul_(2)),
    "training mode of a global module": lambda function: WEIGHTS.train() and WEIGHTS.eval,
    "attribute of a global object": assigns("SETTINGS.rate", lambda _: 2),
    "attribute of a global class": assigns("Limits.top", lambda _: 2),
    "closure": assigns("net.__wrapped__.__closure__.0.cell_contents", lambda _: 2),
} | {name: change for name, change in CHANGES.items() if "global" in name}


@pytest.mark.parametrize("change", OF_FUNCTIONS)
def test_a_change_of_what_a_function_uses_is_noticed(change):
    assert_noticed_and_no_rows_lost(cached_function, OF_FUNCTIONS[change])


def test_what_a_hook_of_the_root_reads_is_noticed_where_it_runs_inside_of_a_method():
    class Encodes(nn.Module):
        def forward(self, x):
            return x * 2

        def encode(self, x):
            return self(x)

    net, scale, x = Encodes(), {"value": 2.0}, torch.rand(6, 4)
    net.register_forward_hook(lambda module, args, output: output * scale["value"])
    torchcache(net, methods=("encode",))
    for scale["value"] in (2.0, 3.0):
        for _ in range(2):
            assert equal(net.encode(x), x * 2 * scale["value"])
    assert hits(net) == 2 * len(x)


def test_a_variable_of_a_closure_that_gets_its_value_later_is_noticed():
    @torchcache
    def function(x):
        try:
            return x * factor
        except NameError:
            return x

    x = torch.rand(6, 4)
    assert equal(function(x), x) and equal(function(x), x)
    factor = 2
    assert equal(function(x), x * 2)
    factor = 3
    assert equal(function(x), x * 3)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(4, 1024)

    def forward(self, x):
        return self.wide(x)


REFRESHED = {
    "middle of data": lambda net: net.wide.weight.data[40].add_(1),
    "middle of a weight as an array": lambda net: net.wide.weight.numpy()[40].__iadd__(1),
    "nothing": lambda net: None,
}


@pytest.mark.parametrize("change", REFRESHED)
@pytest.mark.cpu_only
def test_after_refresh_nothing_is_missed_and_no_rows_are_lost(change):
    net, x = torchcache(Wide()), torch.rand(6, 4)
    before = net(x)
    REFRESHED[change](net)
    net.cache_instance.refresh()
    expected = plain(net, x)
    assert equal(expected, before) == (change == "nothing")
    assert equal(net(x), expected)
    assert equal(net(x), expected)
    assert hits(net) == (12 if change == "nothing" else 6)


def used(net):
    net(torch.rand(3, 4))


def hit(net):
    x = torch.rand(3, 4)
    for batch in (x[:2], x, x, x[:2]):
        net(batch)


def failed(net):
    with pytest.raises(RuntimeError):
        net(torch.rand(3, 5))


def changed_twice(net):
    for _ in range(3):
        used(net)
        net.first.weight.mul_(2)
        net.extra += 1


USES = {
    "used": used,
    "hit": hit,
    "asked": lambda net: net.cache_instance.module_hash + str(net.cache_instance.stats()),
    "bypassed": torch.enable_grad()(used),
    "failed": failed,
    "changed twice": changed_twice,
    "refreshed": lambda net: (used(net), net.cache_instance.refresh(), used(net)),
    "copied": lambda net: (used(net), used(copy.deepcopy(net))),
    "saved": lambda net: (used(net), torch.save(net.state_dict(), io.BytesIO())),
    "with something unreadable": lambda net: (setattr(net, "kept", (i for i in ())), used(net)),
    "with a hook": lambda net: (net.first.register_forward_hook(double), used(net)),
    "closed": lambda net: (used(net), net.cache_instance.close()),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", [cached_class, cached_instance])
@pytest.mark.parametrize("use", USES)
def test_a_module_is_freed_as_soon_as_it_is_dropped(use, make):
    net = make()
    gc.collect()
    gc.disable()
    try:
        USES[use](net)
        watched = [weakref.ref(net), weakref.ref(net.first.weight), weakref.ref(net.cache_instance)]
        del net
        if (use, make) == ("asked", cached_instance):
            gc.collect()  # until it is called, its other methods are watched, and these hold it
        assert [reference() for reference in watched] == [None, None, None]
    finally:
        gc.enable()


def test_weights_in_dicts_that_the_collector_does_not_show_are_noticed(monkeypatch):
    """Python 3.13 does not show the values of a dict that is the ``__dict__`` of an object."""
    monkeypatch.setattr(guard, "get_referents", lambda *dicts: [])
    module = torchcache(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    with torch.no_grad():
        for _ in range(2):
            expected = nn.functional.linear(x, module.weight, module.bias)
            assert torch.equal(module(x), expected) and torch.equal(module(x), expected)
            module.weight = nn.Parameter(module.weight * 2)
