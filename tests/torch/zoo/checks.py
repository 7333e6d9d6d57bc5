"""What holds for every model that is cached, and what an entry of the zoo is.

An entry builds a model with random weights, the same ones after the same seed, and a batch. Inputs are
keyword arguments: tensors in them are batched unless `shared` names the argument, everything else is passed
as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchcache2 import torchcache

SEED = 1
TOTAL = 6  # items that there are
FIRST = [0, 1, 2, 3]
PERMUTED = [2, 0, 3, 1]
HALF_KNOWN = [4, 2, 5, 3]
_MOST_TRIED = 12

Build = Callable[[], nn.Module]
Inputs = Callable[[int], dict[str, Any]]
Edit = Callable[[nn.Module], None]


class ZooError(AssertionError):
    """A check has failed: which, and how."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check = check


class BypassedError(ZooError):
    """The calls of a model were passed through."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model.

    Attributes
    ----------
    build : callable
        Makes the model.
    inputs : callable
        ``inputs(n)``: keyword arguments for n items that differ.
    edits : dict
        By name, changes of attributes and submodules that change the output. A weight is always changed too.
    shared : tuple of str
        Arguments that belong to the whole batch.
    """

    build: Build
    inputs: Inputs
    edits: dict[str, Edit] = dataclasses.field(default_factory=dict)
    shared: tuple[str, ...] = ()


def seeded(build: Build) -> nn.Module:
    """A model in the state in which it can be cached."""
    torch.default_generator.manual_seed(SEED)
    return build().eval().requires_grad_(False)


def all_items(entry: Entry) -> dict[str, Any]:
    """The arguments for all items that there are."""
    torch.default_generator.manual_seed(SEED)
    return entry.inputs(TOTAL)


def some_items(entry: Entry, arguments: dict[str, Any], positions: list[int]) -> dict[str, Any]:
    """The arguments for some of the items."""
    return {
        name: value if name in entry.shared else rows_of(value, positions)
        for name, value in arguments.items()
    }


def rows_of(tree: Any, positions: list[int]) -> Any:
    """Some rows of each tensor."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[positions], tree)


def check_same(check: str, left: Any, right: Any, *, exact: bool = True) -> None:
    """Fail unless two outputs are equal bit by bit, or if not `exact`, as `verify` compares them."""
    left_leaves, left_structure = pytree.tree_flatten(left)
    right_leaves, right_structure = pytree.tree_flatten(right)
    if type(left) is not type(right) or left_structure != right_structure:
        raise ZooError(check, f"the structure is {left_structure}, not {right_structure}")
    for number, (a, b) in enumerate(zip(left_leaves, right_leaves, strict=True)):
        if not isinstance(a, Tensor):
            if type(a) is type(b) and hasattr(a, "__dict__") and not isinstance(a, type):  # such as a cache
                check_same(check, vars(a), vars(b), exact=exact)
            elif a != b:
                raise ZooError(check, f"leaf {number} is {a!r}, not {b!r}")
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            raise ZooError(check, f"leaf {number} is {a.dtype} {a.shape}, not {b.dtype} {b.shape}")
        elif not (_equal(a, b) if exact else _close(a, b)):
            apart = (a.double() - b.double()).abs().max().item()
            raise ZooError(check, f"leaf {number} of shape {tuple(a.shape)} differs by up to {apart:.3g}")


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() or not a.numel() or not a.dim():
        return _equal(a, b)
    precision = torch.finfo(a.dtype).eps
    a, b = a.double().reshape(len(a), -1), b.double().reshape(len(b), -1)
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).amax(1)
    scale = torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0).amax(1)
    return bool((apart <= math.sqrt(precision) * scale + precision**2).all())


def differ(left: Any, right: Any) -> bool:
    """Whether an edit has changed an output."""
    try:
        check_same("", left, right, exact=False)
    except ZooError:
        return True
    return False


class Counted:
    """A cached model whose calls are counted."""

    def __init__(self, model: nn.Module, shared: tuple[str, ...] = ()) -> None:
        self.model = torchcache(model, shared_args=shared)

    def __call__(self, check: str, arguments: dict[str, Any], *, hits: int, misses: int) -> Any:
        """The output for a batch, of which so many items have to be known."""
        before = self.model.cache_instance.stats()
        output = self.model(**arguments)
        after = self.model.cache_instance.stats()
        if after.bypasses != before.bypasses:
            raise BypassedError(check, f"bypassed: {after.bypasses}")
        found = after.hits - before.hits, after.misses - before.misses
        if found != (hits, misses):
            text = f"{found[0]} hits and {found[1]} misses, not {hits} and {misses}"
            raise ZooError(check, text)
        return output


def check_entry(entry: Entry) -> None:
    """Everything that holds for a model, without other processes."""
    plain = seeded(entry.build)
    cached = Counted(copy.deepcopy(plain), entry.shared)
    everything = all_items(entry)
    batch = some_items(entry, everything, FIRST)
    expected = plain(**batch)

    try:
        output = cached("first call", batch, hits=0, misses=4)
    except BypassedError:  # some set themselves up in their first forward
        output = cached("first call", batch, hits=0, misses=4)
    check_same("first call", output, expected)
    check_same("second call", cached("second call", batch, hits=4, misses=0), expected)

    permuted = cached("permuted", some_items(entry, everything, PERMUTED), hits=4, misses=0)
    check_same("permuted", permuted, rows_of(expected, PERMUTED))

    batch_of_both = some_items(entry, everything, HALF_KNOWN)
    partial = cached("partial hits", batch_of_both, hits=2, misses=2)
    check_same("partial hits", partial, plain(**batch_of_both), exact=False)
    check_same("partial hits", rows_of(partial, [1, 3]), rows_of(expected, [2, 3]))

    check_weight(plain, cached, batch, expected)
    for name, edit in entry.edits.items():
        check_edit(name, edit, plain, cached, batch)


def check_weight(plain: nn.Module, cached: Counted, batch: dict[str, Any], expected: Any) -> None:
    """One weight is changed, and changed back."""
    twins = dict(cached.model.named_parameters())
    parameters = [item for item in plain.named_parameters() if item[1].is_floating_point()]
    found = None
    step = len(parameters) // _MOST_TRIED + 1
    for name, weight in [one for first in range(step) for one in parameters[first::step][::-1]]:
        before = weight.clone()
        weight.mul_(1.5).add_(0.25)
        if differ(plain(**batch), expected):
            found = name, weight, before
            break
        weight.copy_(before)  # nothing depends on it
    if found is None:
        raise ZooError("weight", "no change of a weight changes the output")
    name, weight, before = found
    check = f"weight {name}"
    twins[name].copy_(weight)
    check_same(check, cached(check, batch, hits=0, misses=4), plain(**batch))
    check = f"weight {name} changed back"
    for side in (weight, twins[name]):
        side.copy_(before)
    check_same(check, cached(check, batch, hits=4, misses=0), expected)


def check_edit(name: str, edit: Edit, plain: nn.Module, cached: Counted, batch: dict[str, Any]) -> None:
    """An attribute or a submodule is changed, for good."""
    before = plain(**batch)
    for model in (plain, cached.model):
        torch.default_generator.manual_seed(SEED)
        edit(model)
    after = plain(**batch)
    if not differ(before, after):
        raise ZooError(name, "the edit does not change the output")
    try:
        check_same(name, cached(name, batch, hits=0, misses=4), after)
    except BypassedError:  # transformers adds hooks in the first forward that is to capture something
        check_same(name, cached(name, batch, hits=0, misses=4), after)
    check_same(name, cached(name, batch, hits=4, misses=0), after)


def check_guessed_edits(entry: Entry) -> None:
    """Edits of a model that nobody has looked at: a number of a norm, and another module in a place."""
    plain = seeded(entry.build)
    cached = Counted(copy.deepcopy(plain), entry.shared)
    batch = some_items(entry, all_items(entry), FIRST)
    cached.model(**batch)
    for name, edit in (("eps", _with_other_eps), ("swapped", _with_swapped_module)):
        expected = plain(**batch)
        places = [place for place, module in plain.named_modules() if place and edit(module) is not None]
        for place in places[-3:]:
            twin = copy.deepcopy(plain)
            twin.set_submodule(place, edit(twin.get_submodule(place)))
            try:
                works = differ(twin(**batch), expected)
            except TimeoutError:
                raise
            except Exception:  # what is put in its place does not fit
                works = False
            if works:
                check_edit(f"{name} of {place}", _put(place, edit), plain, cached, batch)
                break


def _put(place: str, edit: Callable[[nn.Module], nn.Module | None]) -> Edit:
    def change(model: nn.Module) -> None:
        model.set_submodule(place, edit(model.get_submodule(place)))

    return change


def _with_other_eps(module: nn.Module) -> nn.Module | None:
    for name in ("eps", "variance_epsilon"):
        if isinstance(vars(module).get(name), float):
            module = copy.copy(module)
            setattr(module, name, 0.5)
            return module
    return None


def _with_swapped_module(module: nn.Module) -> nn.Module | None:
    is_activation = type(module).__module__ == nn.ReLU.__module__ and not any(
        True for _ in module.parameters()
    )
    return nn.Tanh() if is_activation and not isinstance(module, nn.Tanh) else None


def check_passed_through(entry: Entry) -> None:
    """What is not cached still gives what it gives without the cache."""
    plain = seeded(entry.build)
    cached = torchcache(copy.deepcopy(plain), shared_args=entry.shared)
    everything = all_items(entry)
    for positions in (FIRST, FIRST, PERMUTED, HALF_KNOWN):
        batch = some_items(entry, everything, positions)
        torch.default_generator.manual_seed(SEED)
        expected = plain(**batch)
        torch.default_generator.manual_seed(SEED)
        check_same(f"passed through {positions}", cached(**batch), expected, exact=False)
