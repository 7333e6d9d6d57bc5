"""`Mapped`: what a function makes of the samples of a dataset, kept by their names.

It is a `ModuleCache` whose calls get indices instead of inputs: a call whose rows are all there touches no
sample. Its namespace covers the dataset, the function and what that closes over, and the modes of torch; the
net, verdicts, claims and bypasses are those of a cached function.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate, get_worker_info

from torchcache2.core.errors import NotCachedError, OptionError, OutputError
from torchcache2.core.keys import Keys, Positions
from torchcache2.core.logs import shown
from torchcache2.core.private import modes
from torchcache2.core.rows import Parts, Rows
from torchcache2.core.settings import CacheSettings, disabled_by_environment
from torchcache2.core.values import UnstorableError, mapped
from torchcache2.datasets.identity import as_array, as_index
from torchcache2.datasets.samplekeys import SampleKeys
from torchcache2.datasets.source import One, Source
from torchcache2.datasets.store import Levels, Store, in_mode
from torchcache2.datasets.tally import Tally
from torchcache2.datasets.views import generator
from torchcache2.decorator.bypass import BypassError
from torchcache2.decorator.forward import Computation
from torchcache2.decorator.modulecache import ModuleCache, Owner
from torchcache2.decorator.probe import CallChecks
from torchcache2.decorator.tracing import is_traced
from torchcache2.engine.batch import Batch
from torchcache2.engine.running import Compiler, Forward, outside
from torchcache2.engine.stack import TierStack
from torchcache2.engine.values.outputs import Lists, found, items_of, output_of, rows_of, stored
from torchcache2.engine.values.samples import Samples
from torchcache2.files.contents import FileDigests
from torchcache2.identity.arguments import BoundCall, Signature
from torchcache2.identity.encoding import digest, qualified_name, sized, text_bytes
from torchcache2.identity.fingerprint import Fingerprint

_CPU, _ONE = torch.device("cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
KeysOf = Callable[[bytes, Positions], Keys]


def _by_index(indices: Tensor) -> None:
    """The signature of what is cached."""


def watchable(function: Callable[..., Any]) -> types.FunctionType:
    """A function that calls this one, unless it is one."""
    if isinstance(function, types.FunctionType):
        return function

    def embed(batch: Any) -> Any:
        return function(batch)

    return cast(types.FunctionType, embed)


class Map:
    """A function of a collated batch of samples, and what it depends on.

    Parameters
    ----------
    function : callable
        A function, bound method, module, or other callable.
    collate : callable, optional
        Makes a batch of a list of samples; None: `torch.utils.data.default_collate`.
    settings : CacheSettings
        Options that are part of the namespace.
    samples : Fingerprint
        Identifies the samples.
    sample_keys : SampleKeys
        Which sample an index is.
    seed : int
        Of the generators of each sample, for a function with a parameter ``generators``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        collate: Callable[[list[Any]], Any] | None,
        settings: CacheSettings,
        samples: Fingerprint,
        sample_keys: SampleKeys,
        seed: int,
    ) -> None:
        if not callable(function) or isinstance(function, type):
            raise OptionError(
                f"map={shown(function)}: expected a function of a batch of samples, a method, or a module"
            )
        self.function, self.collate = function, collate
        self.method = "forward"
        root: Any = function
        if isinstance(function, types.MethodType):
            self.method, root = function.__name__, function.__self__
        elif not isinstance(function, nn.Module):
            root = watchable(function)
        self.root = root
        self.owner = Owner(None)
        self.owner.root = weakref.ref(root)
        self.keeper = keeper = self.owner.keeper(settings)
        keeper.name = self.title = getattr(function, "__name__", type(function).__name__)
        if not isinstance(root, types.FunctionType):
            keeper.methods = {self.method}
        keeper.arguments |= set(settings.ignore)  # they may be paths of the samples
        keeper.beside = {f"samples {name}": data for name, data in samples.parts.items()}
        keeper.texts = {f"samples {name}": text for name, text in samples.values.items()}
        signature = functools.partial(Signature, _by_index, shared=(), content=FileDigests(None).of)
        keeper.beside["modes of torch"] = digest([signature().bind((_ONE,), {}).context])
        self._signature = signature(
            method=self.method, ignore=settings.ignore, code_version=settings.code_version
        )
        self._usual = modes(("cpu",))
        self._sample_keys, self._seed = sample_keys, seed
        self._draws = False
        with contextlib.suppress(TypeError, ValueError):  # it has no signature
            called: Any = function.forward if isinstance(function, nn.Module) else function
            self._draws = "generators" in inspect.signature(called).parameters
        if self._draws:
            keeper.beside["seed"], keeper.texts["seed"] = digest([text_bytes(str(seed))]), str(seed)
        self._collating = Owner(None).keeper(settings)
        self._collate = None if collate is None else watchable(collate)
        self.now()
        keeper.unread += self._collating.unread

    @property
    def counted(self) -> list[Any]:
        """What it depends on, besides the samples."""
        return [self.function, self.collate, self._seed if self._draws else None]

    def look_at_collate(self) -> None:
        """Notice what has changed in `collate`; the keeper notices changes of the function."""
        if self._collate is not None:
            self.keeper.put_beside("collate_fn", self._collating.look(self._collate).namespace)

    def now(self) -> tuple[bytes, bytes | None]:
        """The namespace, and the mode, of what it would make now; see `Levels`."""
        self.look_at_collate()
        return self.keeper.look(self.root).namespace, self.mode()

    def mode(self) -> bytes | None:
        """The modes of torch, as 16 bytes; None: those in the namespace."""
        if modes(("cpu",)) == self._usual:
            return None
        return digest([self._signature.bind((_ONE,), {}).context])

    def of(self, samples: list[Any], indices: Sequence[int]) -> Any:
        """What the function makes of samples at some indices, on the host."""
        options = {}
        if self._draws:
            names = self._sample_keys.of(bytes(16), indices).data
            options["generators"] = [generator((self._seed, name.tobytes())) for name in names]
        output = self.function((self.collate or default_collate)(samples), **options)
        return mapped(_on_host, output, objects=True)

    @staticmethod
    def items(output: Any, count: int, lists: Lists | None = None) -> list[Any]:
        """What belongs to each of n samples in an output."""
        try:
            items: list[Any] = [None] * count
            for positions, rows in parts_of(output, count, Lists(Samples(), {}) if lists is None else lists):
                for position, item in zip(positions.tolist(), items_of(rows), strict=True):
                    items[position] = item
            return items
        except (UnstorableError, OutputError):
            return [mapped(functools.partial(_item, i, count), output, objects=True) for i in range(count)]

    def name(self) -> str:
        """Its qualified name."""
        function = self.function
        is_named = inspect.isroutine(function)
        return qualified_name(function if is_named else type(function))


class Mapped(ModuleCache):
    """The cache of a `Map`, in one process; `source` loads samples, and `keys_of` names them."""

    def __init__(
        self,
        made_of: Map,
        source: Source,
        keys_of: KeysOf,
        settings: CacheSettings,
        tiers: TierStack,
        description: Callable[[], Mapping[str, Any]],
    ) -> None:
        super().__init__(settings, tiers, owner=made_of.owner, names=self._names)
        self.map, self._source, self._keys_of, self._described = made_of, source, keys_of, description

        def plain(indices: Tensor) -> Any:
            return self._output_of(indices.tolist())

        self._plain = plain
        self.bind(made_of.root, plain, made_of.method)
        self.keeper.name = self.engine.name = made_of.title

    def __call__(self, indices: Sequence[int]) -> Any:
        """The output for n samples, its tensors on the CPU."""
        # Parts of the batch need its samples again. Rows have no graph.
        with self._source.holding(self._source.held() or {}), torch.no_grad():
            plain = as_array(indices)
            if plain.dtype != np.int64:
                raise TypeError(f"an index {shown(plain[0])}: with map=, indices are ints")
            return outside(self._called, torch.from_numpy(plain))

    def _called(self, compiler: Compiler, indices: Tensor) -> Any:
        return self.call(Forward(self._plain, compiler), (indices,), {})

    def _computation(
        self, root: Any, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Computation | None:
        self.map.look_at_collate()
        return super()._computation(root, forward, args, kwargs)

    def asked(self, indices: Positions) -> Computation | None:
        """The call for n samples, as the module is now; None if it cannot be cached."""
        is_passed = self._known.runner.is_inside or not self.settings.enabled or self.settings.verify > 0.0
        if is_passed or is_traced() or disabled_by_environment() or indices.dtype != np.int64:
            return None
        forward = Forward(self._plain)
        with torch.no_grad(), contextlib.suppress(BypassError):
            return self._computation(self.living_root(), forward, (torch.from_numpy(indices),), {})
        return None

    def found(self, asked: Computation, some: slice, rows: Rows) -> list[Any]:
        """The output for some samples of a call, in a list, from their rows; empty if a check is due."""
        start, keys = time.perf_counter(), asked.keys
        if not self._holds(asked):
            return []
        keys, checks = Keys(keys.namespace, keys.data[some], keys.group), asked.checks
        if isinstance(checks, CallChecks):
            try:
                checks = checks.of(keys)
            except BypassError:
                return []
            if checks.is_due(len(keys)):
                return []
        try:
            output = output_of(found(rows), device=_CPU)
        except Exception:  # rows that disagree about a value of the whole batch
            return []
        spent = time.perf_counter() - start
        self.engine.counters.count(hits=len(keys), misses=0, computed=0, seconds=0.0, spent=spent)
        checks.settle(Batch(keys, asked, self.settings), spent)
        return [output]

    def _holds(self, asked: Computation) -> bool:
        """Whether the map, its weights and the modes of torch are still those of a call."""
        try:
            is_same = self.map.now()[0] == asked.keys.namespace
        except Exception:  # the usual call says why
            return False
        return is_same and asked.call.context.endswith(sized(text_bytes(modes(("cpu",)))))

    def raise_if_bypassed(self) -> None:
        """Raise `NotCachedError` if the last call was not cached."""
        if self.bypass is not None:
            raise BypassError(self.bypass, self.reasons[self.bypass]).as_error(self.name)

    def plainly(self, indices: Sequence[int]) -> Any:
        """The same without the cache."""
        with torch.no_grad():
            return self._output_of(indices)

    def _output_of(self, indices: Sequence[int]) -> Any:
        samples, is_steady = self._source.load(indices)
        self.drew |= not is_steady
        return self.map.of(samples, indices)

    drew = False  # whether samples drew random numbers

    def parts(self, output: Any, count: int) -> Parts:
        """The rows of an output for `count` samples, as tiers keep them."""
        return parts_of(output, count, self._lists(count))

    def items(self, output: Any, count: int) -> list[Any]:
        """The output of each of `count` samples, from that of their batch."""
        return self.map.items(output, count, self._lists(count))

    def _lists(self, count: int) -> Lists:
        call = self._known.signature.bind((torch.arange(max(1, count), device="cpu"),), {})
        return self._known.lists(self._known.context(self.namespace, call))

    def _names(self, namespace: bytes, call: BoundCall) -> Keys:
        """The keys of a call's samples; under other modes of torch, they have other keys."""
        keys = self._keys_of(namespace, call.args[0].numpy())
        return in_mode(keys, self.map.mode())

    def description(self, namespace: bytes) -> dict[str, Any]:
        """The description of the samples' namespace."""
        own = super().description(namespace)
        return {**self._described(), **{name: own[name] for name in ("parts", "values") if name in own}}


def parts_of(output: Any, count: int, lists: Lists) -> Parts:
    """The rows of an output for `count` samples, as tiers keep them."""
    lists.known.update(dict.fromkeys(lists.unsettled(output, count), True))  # most likely
    return stored(rows_of(output, count, lists, device=_CPU))


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


def _item(position: int, count: int, leaf: Any) -> Any:
    is_batched = isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim and len(leaf) == count
    return leaf[position] if is_batched else leaf


class MappedStore(Store):
    """Finds what a map has made of samples; only where there is a `mapped` is anything made."""

    def __init__(
        self, name: str, levels: Levels, tally: Tally, source: Source, mapped: Mapped | None
    ) -> None:
        super().__init__(name, levels, tally, source)
        self.mapped = mapped
        self._has_followed = False

    def fetch(self, indices: Sequence[Any], one: One | None = None) -> list[Any]:
        """What the map makes of n samples; in a worker, an error if it is not there."""
        plain = [as_index(index) for index in indices]
        if self.is_making:
            return self.mapped.items(self.output(plain), len(plain))  # type: ignore[union-attr]
        self.follow()
        keys, is_worker = self.levels.keys(plain), get_worker_info() is not None
        sought = self.find(keys)
        if is_worker and not sought.found.all():
            self.tally.ask()  # the process that runs map may not have written them yet
            self.levels.look_again()
            sought = self.find(keys)
        if not sought.found.all():
            missing = plain[int(np.flatnonzero(~sought.found)[0])]
            why = (
                "it is sealed, or a copy"
                if not is_worker
                else "a worker does not run map=. Fill it with warmup(), or read batches by loader(), which "
                "runs map in this process"
            )
            raise NotCachedError(f"{self.name}: nothing is kept for sample {missing!r}, and {why}")
        self.tally.add(**sought.counts)
        return sought.samples

    def find_one(self, index: int) -> list[Any]:
        """As for samples, of what the map would make now."""
        try:
            self.follow()
        except Exception:  # the usual call says why
            return []
        return super().find_one(index)

    def follow(self) -> None:
        """Name the rows of what the map, its weights and the modes of torch are now."""
        if self.mapped is None or self._has_followed:
            return
        self.levels.namespace, self.levels.mode = self.mapped.map.now()
        self._has_followed = not self.is_making  # a worker's copy does not change

    def end_map(self) -> None:
        """Run the map no more."""
        mapped, self.mapped = self.mapped, None
        if mapped is not None:  # it uses the tiers, too, until it is collected
            mapped.engine.close(forgets=False)

    def close(self) -> None:
        """Write queued rows, and release memory and servers."""
        self.end_map()
        super().close()

    @property
    def is_making(self) -> bool:
        """Whether this process runs the map."""
        return self.mapped is not None and get_worker_info() is None

    def output(self, indices: Sequence[Any]) -> Any:
        """What the map makes of a batch of n samples, found or computed."""
        mapped, tally = self.mapped, self.tally
        assert mapped is not None
        if tally.is_random:
            tally.add(random=len(indices))
            return mapped.plainly(indices)
        drops, counters, start = tally.drops, mapped.engine.counters, time.perf_counter()
        before = counters.misses, counters.verified, counters.mismatched, counters.seconds_computed
        passed = dict(counters.bypasses)
        output = mapped(indices)
        for reason, count in counters.bypasses.items():
            tally.bypasses[reason] += count - passed.get(reason, 0)
        seconds = counters.seconds_computed - before[3]
        tally.add(
            misses=int(counters.misses - before[0]),
            verified=counters.verified - before[1],
            mismatched=counters.mismatched - before[2],
            nanoseconds=int(seconds * 1e9),
            spent=int((time.perf_counter() - start - seconds) * 1e9),
        )
        if mapped.drew:
            mapped.drew = False
            self.moved(indices[0], None)
        by = self.levels.by
        if counters.misses > before[0] and not by.hold(by.of(bytes(16), indices), indices):
            self.follow()
            self.levels.clear()
            self.told(
                "edited", "%s: a file was edited while it was loaded, so all rows are dropped", self.name
            )
        if tally.drops != drops:
            self.levels.drop(mapped.namespace)
        return output

    def insert(self, keys: Keys, output: Any) -> None:
        """Keep an output for n samples that was made elsewhere."""
        if self.mapped is None:
            raise NotCachedError(f"{self.name}: nothing can be inserted, as it is sealed, or a copy")
        for positions, rows in self.mapped.parts(output, len(keys)):
            self.levels.put(self.mapped, keys.take(positions), rows)
