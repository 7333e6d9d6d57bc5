"""Every change of a module is noticed at the very next call."""

import contextlib
import copy
import dataclasses
import gc
import io
import os
import types
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from tests.helpers.outputs import hits
from torchcache2 import torchcache

FACTOR = 2


@pytest.fixture(autouse=True)
def _without_grad():
    with torch.no_grad():
        yield


def equal(first, second):
    return first.dtype == second.dtype and torch.equal(first, second)


def plain(module, *args):
    """The output without the cache, which does not even see the call."""
    with mock.patch.dict(os.environ, TORCHCACHE_DISABLE="1"):
        return module(*args)


class Inner:
    def __init__(self):
        self.rate = 1


class Config:
    def __init__(self):
        self.rate = 1
        self.inner = Inner()


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


# Each changes a module, and returns what takes the change back.


def in_place(net):
    net.first.weight.mul_(2)
    return lambda: net.first.weight.div_(2)


def one_element_in_place(net):
    kept = net.body[2].layer.weight[2, 3].clone()
    net.body[2].layer.weight[2, 3] = 1
    return lambda: net.body[2].layer.weight[2, 3].copy_(kept)


def data_in_place(net):
    net.body[0].weight.data.mul_(2)
    return lambda: net.body[0].weight.data.div_(2)


def first_element_of_data(net):
    weight = net.first.weight
    weight.data[0, 0] = 3.0
    return lambda: weight.data[0].__setitem__(0, 0.5)


def new_data(net):
    old, net.first.weight.data = net.first.weight.data, torch.ones(4, 4)
    return lambda: setattr(net.first.weight, "data", old)


def transposed_data(net):
    # The same storage, read in another order.
    net.first.weight.data = net.first.weight.data.t()
    return lambda: setattr(net.first.weight, "data", net.first.weight.data.t())


def shifted_data(net):
    net.shift.data = torch.arange(8.0)[4:]
    return lambda: setattr(net.shift, "data", torch.ones(4))


def vector_into_parameters(net):
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector * 2, net.parameters())
    return lambda: nn.utils.vector_to_parameters(vector, net.parameters())


def numpy_write(net):
    array = net.first.weight.numpy()
    kept = array.copy()
    array[...] = 1
    return lambda: array.__setitem__(..., kept)


def numpy_write_to_a_buffer(net):
    array = net.shift.numpy()
    array[2] = 5
    return lambda: array.__setitem__(2, 1)


def loaded_state(net):
    old = copy.deepcopy(net.state_dict())
    net.load_state_dict({name: tensor + 1 for name, tensor in old.items()})
    return lambda: net.load_state_dict(old)


def assigned_state(net):
    old = copy.deepcopy(net.state_dict())
    net.load_state_dict({name: tensor + 1 for name, tensor in old.items()}, assign=True)
    return lambda: net.load_state_dict(old, assign=True)


def in_double(net):
    net.double()
    net.loose = net.loose.double()
    return lambda: (net.float(), setattr(net, "loose", net.loose.float()))


def in_half(net):
    old = copy.deepcopy(net.state_dict())
    net.half()
    return lambda: (net.float(), net.load_state_dict(old))


def in_bfloat16(net):
    old = copy.deepcopy(net.state_dict())
    net.to(torch.bfloat16)
    return lambda: (net.to(torch.float32), net.load_state_dict(old))


def part_in_double(net):
    net.scale.data = net.scale.data.double()
    return lambda: setattr(net.scale, "data", net.scale.data.float())


def replaced_parameter(net):
    old, net.scale = net.scale, nn.Parameter(torch.full((4,), 2.0))
    return lambda: setattr(net, "scale", old)


def replaced_parameter_of_a_submodule(net):
    old, net.first.weight = net.first.weight, nn.Parameter(torch.ones(4, 4))
    return lambda: setattr(net.first, "weight", old)


def removed_parameter(net):
    old, net.first.bias = net.first.bias, None
    return lambda: setattr(net.first, "bias", old)


def replaced_buffer(net):
    old, net.shift = net.shift, torch.zeros(4)
    return lambda: setattr(net, "shift", old)


def buffer_in_place(net):
    net.shift.zero_()
    return lambda: net.shift.fill_(1)


def replaced_submodule(net):
    old, net.first = net.first, nn.Linear(4, 4)
    return lambda: setattr(net, "first", old)


def replaced_by_index(net):
    old, net.body[1] = net.body[1], nn.Sigmoid()
    return lambda: net.body.__setitem__(1, old)


def replaced_deep_inside(net):
    old, net.body[2].layer = net.body[2].layer, nn.Linear(4, 4)
    return lambda: setattr(net.body[2], "layer", old)


def appended_submodule(net):
    net.parts.append(nn.Linear(4, 4))
    return lambda: net.parts.pop(-1)


def removed_submodule(net):
    old = net.parts.pop(0)
    return lambda: net.parts.append(old)


def swapped_submodules(net):
    net.first, net.parts[0] = net.parts[0], net.first
    return lambda: swapped_submodules(net)


def added_attribute(net):
    net.added = 1
    return lambda: delattr(net, "added")


def removed_attribute(net):
    del net.extra
    return lambda: setattr(net, "extra", 1)


def renamed_attribute(net):
    net.added = net.extra
    del net.extra
    return lambda: (setattr(net, "extra", net.added), delattr(net, "added"))


def changed_attribute(net):
    net.extra = 2
    return lambda: setattr(net, "extra", 1)


def attribute_of_another_type(net):
    net.rate = 1.0
    return lambda: setattr(net, "rate", 1)


def attribute_of_a_submodule(net):
    net.body[2].rate = 2
    return lambda: setattr(net.body[2], "rate", 1)


def replaced_loose_tensor(net):
    old, net.loose = net.loose, torch.full((4,), 2.0)
    return lambda: setattr(net, "loose", old)


def loose_tensor_in_place(net):
    net.loose.mul_(2)
    return lambda: net.loose.div_(2)


def listed_tensor_in_place(net):
    net.listed[1].mul_(2)
    return lambda: net.listed[1].div_(2)


def deeply_listed_tensor_in_place(net):
    net.listed[2]["a"].data.mul_(2)
    return lambda: net.listed[2]["a"].data.div_(2)


def replaced_list(net):
    old, net.listed = net.listed, [2, *net.listed[1:]]
    return lambda: setattr(net, "listed", old)


def replaced_function(net):
    old, net.step = net.step, adds(2)
    return lambda: setattr(net, "step", old)


def closure_cell(net):
    net.step.__closure__[0].cell_contents = 2
    return lambda: setattr(net.step.__closure__[0], "cell_contents", 1)


def attribute_of_a_config(net):
    net.config.rate = 2
    return lambda: setattr(net.config, "rate", 1)


def attribute_of_a_config_in_a_config(net):
    net.config.inner.rate = 2
    return lambda: setattr(net.config.inner, "rate", 1)


def added_to_a_config(net):
    net.config.bonus = 1
    return lambda: delattr(net.config, "bonus")


def replaced_config(net):
    old, net.config = net.config, Config()
    net.config.rate = 2
    return lambda: setattr(net, "config", old)


def field_of_a_dataclass(net):
    net.options.rate = 2
    return lambda: setattr(net.options, "rate", 1)


def slot_of_an_object(net):
    net.slotted.rate = 2
    return lambda: setattr(net.slotted, "rate", 1)


def private_slot_of_an_object(net):
    net.slotted._Slotted__factor = 2
    return lambda: setattr(net.slotted, "_Slotted__factor", 1)


def hook(net):
    return net.first.register_forward_hook(lambda module, args, output: output * 2).remove


def prehook(net):
    return net.body[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,)).remove


def hook_of_the_root(net):
    return net.register_forward_hook(lambda module, args, output: output * 2).remove


def global_hook(net):
    return register_module_forward_hook(lambda module, args, output: output * 1.5).remove


def global_prehook(net):
    return register_module_forward_pre_hook(lambda module, args: (args[0] * 1.5,)).remove


def training_mode(net):
    net.train()
    return net.eval


def training_mode_by_assignment(net):
    net.training = True
    return lambda: setattr(net, "training", False)


def global_number(net):
    globals()["FACTOR"] = 3
    return lambda: globals().update(FACTOR=2)


def global_function(net):
    old = helper
    globals()["helper"] = other_helper
    return lambda: globals().update(helper=old)


def code_of_a_global_function(net):
    # As reloading in a notebook does.
    old, helper.__code__ = helper.__code__, other_helper.__code__
    return lambda: setattr(helper, "__code__", old)


def defaults_of_a_global_function(net):
    old, helper.__defaults__ = helper.__defaults__, (2,)
    return lambda: setattr(helper, "__defaults__", old)


def keyword_defaults_of_a_global_function(net):
    old, helper.__kwdefaults__ = helper.__kwdefaults__, {"root": 2}
    return lambda: setattr(helper, "__kwdefaults__", old)


def attribute_of_a_global_function(net):
    helper.offset = 2
    return lambda: setattr(helper, "offset", 1)


def global_that_hides_a_builtin(net):
    globals()["round"] = lambda number: 9
    return lambda: globals().pop("round")


def class_attribute(net):
    Net.offset = 2
    return lambda: setattr(Net, "offset", 1)


def class_attribute_of_a_submodule(net):
    Block.offset = 2
    return lambda: setattr(Block, "offset", 1)


def class_attribute_of_a_subclass(net):
    kind = type(net)
    own = "offset" in vars(kind)
    kind.offset = 3
    return lambda: setattr(kind, "offset", 1) if own else delattr(kind, "offset")


def method_of_a_class(net):
    old, Net.helped = Net.helped, OtherNet.helped
    return lambda: setattr(Net, "helped", old)


def method_on_the_instance(net):
    net.helped = types.MethodType(OtherNet.helped, net)
    return lambda: delattr(net, "helped")


def class_of_a_submodule(net):
    net.body[2].__class__ = OtherBlock
    return lambda: setattr(net.body[2], "__class__", Block)


def class_of_the_module(net):
    old = type(net)
    net.__class__ = type("Other", (old,), {"helped": OtherNet.helped})
    return lambda: setattr(net, "__class__", old)


def parametrisation(net):
    nn.utils.parametrize.register_parametrization(net.first, "weight", nn.Tanh())
    return lambda: nn.utils.parametrize.remove_parametrizations(net.first, "weight", leave_parametrized=False)


CHANGES = [
    in_place,
    one_element_in_place,
    data_in_place,
    first_element_of_data,
    new_data,
    transposed_data,
    shifted_data,
    vector_into_parameters,
    numpy_write,
    numpy_write_to_a_buffer,
    loaded_state,
    assigned_state,
    in_double,
    in_half,
    in_bfloat16,
    part_in_double,
    replaced_parameter,
    replaced_parameter_of_a_submodule,
    removed_parameter,
    replaced_buffer,
    buffer_in_place,
    replaced_submodule,
    replaced_by_index,
    replaced_deep_inside,
    appended_submodule,
    removed_submodule,
    swapped_submodules,
    added_attribute,
    removed_attribute,
    renamed_attribute,
    changed_attribute,
    attribute_of_another_type,
    attribute_of_a_submodule,
    replaced_loose_tensor,
    loose_tensor_in_place,
    listed_tensor_in_place,
    deeply_listed_tensor_in_place,
    replaced_list,
    replaced_function,
    closure_cell,
    attribute_of_a_config,
    attribute_of_a_config_in_a_config,
    added_to_a_config,
    replaced_config,
    field_of_a_dataclass,
    slot_of_an_object,
    private_slot_of_an_object,
    hook,
    prehook,
    hook_of_the_root,
    global_hook,
    global_prehook,
    training_mode,
    training_mode_by_assignment,
    global_number,
    global_function,
    code_of_a_global_function,
    defaults_of_a_global_function,
    keyword_defaults_of_a_global_function,
    attribute_of_a_global_function,
    global_that_hides_a_builtin,
    class_attribute,
    class_attribute_of_a_submodule,
    class_attribute_of_a_subclass,
    method_of_a_class,
    method_on_the_instance,
    class_of_a_submodule,
    class_of_the_module,
    parametrisation,
]


@pytest.mark.parametrize("make", [cached_class, cached_instance])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.one_in(2)
@pytest.mark.cpu_only
def test_a_change_is_noticed_at_the_next_call_and_rows_are_not_lost(change, make):
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


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, 0.1, fused=True),
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, 0.1, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
    "adam fused": lambda parameters: torch.optim.Adam(parameters, 0.1, fused=True),
    "adam foreach": lambda parameters: torch.optim.Adam(parameters, 0.1, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "adagrad fused": lambda parameters: torch.optim.Adagrad(parameters, 0.1, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_step_is_noticed(optimizer):
    net, x = cached_class(), torch.rand(6, 4)
    stepper = optimizer(list(net.parameters()))
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_through_the_module_is_noticed_even_if_few_weights_move(optimizer):
    net = torchcache(Rows())
    stepper = optimizer(net.parameters())
    rows = torch.tensor([300, 310, 320])
    for _ in range(3):
        before = net(rows)
        assert equal(net(rows), before)
        with torch.enable_grad():
            net(rows).sum().backward()
        stepper.step()
        expected = plain(net, rows)
        assert not equal(expected, before)
        assert equal(net(rows), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_that_moves_few_weights_is_noticed(optimizer):
    net = torchcache(Rows())
    stepper = optimizer(net.parameters())
    rows = torch.tensor([300, 310, 320])
    with torch.enable_grad():
        loss = net(rows).sum()
    before = net(rows)  # after the bypass, before the step
    assert equal(net(rows), before)
    loss.backward()
    stepper.step()
    expected = plain(net, rows)
    assert not equal(expected, before)
    assert equal(net(rows), expected)


@pytest.mark.parametrize("change", [data_in_place, first_element_of_data, buffer_in_place, numpy_write])
@pytest.mark.cpu_only
def test_changes_of_inference_tensors_are_noticed(change):
    x = torch.rand(6, 4)
    with torch.inference_mode():
        net = cached_class()
        assert all(parameter.is_inference() for parameter in net.parameters())
        before = net(x)
        assert equal(net(x), before)
        undo = change(net)
        expected = plain(net, x)
        assert not equal(expected, before)
        assert equal(net(x), expected)
        undo()
        assert equal(net(x), before)
    assert hits(net) == 12


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


def test_the_precision_of_matrix_products_is_noticed():
    net, x = cached_instance(), torch.rand(6, 4)
    before = torch.get_float32_matmul_precision()
    try:
        net(x)
        torch.set_float32_matmul_precision("medium")
        net(x)
        assert hits(net) == 0
    finally:
        torch.set_float32_matmul_precision(before)
    net(x)
    assert hits(net) == 6


def global_module(function):
    WEIGHTS.weight.mul_(2)
    return lambda: WEIGHTS.weight.div_(2)


def training_mode_of_a_global_module(function):
    WEIGHTS.train()
    return WEIGHTS.eval


def attribute_of_a_global_object(function):
    SETTINGS.rate = 2
    return lambda: setattr(SETTINGS, "rate", 1)


def attribute_of_a_global_class(function):
    Limits.top = 2
    return lambda: setattr(Limits, "top", 1)


def closure_of_the_function(function):
    cell = function.__wrapped__.__closure__[0]
    cell.cell_contents = 2
    return lambda: setattr(cell, "cell_contents", 1)


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


@pytest.mark.parametrize(
    "change",
    [
        global_module,
        training_mode_of_a_global_module,
        attribute_of_a_global_object,
        attribute_of_a_global_class,
        closure_of_the_function,
        global_number,
        global_function,
        code_of_a_global_function,
        defaults_of_a_global_function,
        attribute_of_a_global_function,
        global_that_hides_a_builtin,
        global_hook,
    ],
)
def test_a_change_of_what_a_function_uses_is_noticed(change):
    test_a_change_is_noticed_at_the_next_call_and_rows_are_not_lost(change, cached_function)


def changed_list(net):
    net.listed[0] = 2


def changed_dict(net):
    net.listed[2]["a"] = torch.zeros(4)


def changed_array(net):
    net.array[0] = 2


def middle_of_data(net):
    net.wide.weight.data[40] += 1


def middle_of_a_numpy_array(net):
    net.wide.weight.numpy()[40] += 1


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.listed = [1, None, {"a": torch.ones(4)}]
        self.array = torch.ones(2).numpy()
        self.wide = nn.Linear(4, 1024)

    def forward(self, x):
        return self.wide(x) * self.listed[0] + self.listed[2]["a"].sum() + self.array[0].item()


@pytest.mark.parametrize(
    "change", [changed_list, changed_dict, changed_array, middle_of_data, middle_of_a_numpy_array]
)
@pytest.mark.cpu_only
def test_after_refresh_nothing_is_missed(change):
    net, x = torchcache(Wide()), torch.rand(6, 4)
    before = net(x)
    change(net)
    net.cache_instance.refresh()
    expected = plain(net, x)
    assert not equal(expected, before)
    assert equal(net(x), expected)
    assert equal(net(x), expected)
    assert hits(net) == 6


def test_refresh_loses_no_rows():
    net, x = cached_class(), torch.rand(6, 4)
    net(x)
    net.cache_instance.refresh()
    net(x)
    assert hits(net) == 6


def used(net):
    net(torch.rand(3, 4))


def hit(net):
    x = torch.rand(3, 4)
    net(x)
    net(x)
    net(x[:2])


def partly_hit(net):
    x = torch.rand(3, 4)
    net(x[:2])
    net(x)


def asked(net):
    assert net.cache_instance.module_hash
    assert str(net.cache_instance.stats())


def bypassed(net):
    with torch.enable_grad():
        net(torch.rand(3, 4))


def failed(net):
    try:
        net(torch.rand(3, 5))
    except RuntimeError:
        return
    raise AssertionError("the shapes fit")


def changed_twice(net):
    used(net)
    for _ in range(2):
        in_place(net)
        changed_attribute(net)
        used(net)


def refreshed(net):
    used(net)
    net.cache_instance.refresh()
    used(net)


def copied(net):
    used(net)
    used(copy.deepcopy(net))


def saved(net):
    used(net)
    torch.save(net.state_dict(), io.BytesIO())


def with_something_unreadable(net):
    net.kept = (i for i in ())
    used(net)


def with_a_hook(net):
    net.first.register_forward_hook(lambda module, args, output: output * 2)
    used(net)


def closed(net):
    used(net)
    net.cache_instance.close()


@pytest.mark.parametrize("make", [cached_class, cached_instance])
@pytest.mark.parametrize(
    "use",
    [
        used,
        hit,
        partly_hit,
        asked,
        bypassed,
        failed,
        changed_twice,
        refreshed,
        copied,
        saved,
        with_something_unreadable,
        with_a_hook,
        closed,
    ],
)
def test_a_module_is_freed_as_soon_as_it_is_dropped(use, make):
    net = make()
    gc.collect()
    gc.disable()
    try:
        use(net)
        watched = [weakref.ref(net), weakref.ref(net.first.weight), weakref.ref(net.cache_instance)]
        del net
        if (use, make) == (asked, cached_instance):
            gc.collect()  # until it is called, its other methods are watched, and these hold it
        assert [reference() for reference in watched] == [None, None, None]
    finally:
        gc.enable()
