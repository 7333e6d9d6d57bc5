"""`Loader`: batches of a cached dataset, straight from its rows.

A batch whose rows are all there is gathered from the tiers: no worker, no sample, no collating. Where a tier
is slow, a thread reads the rows of the next batches meanwhile. Of other batches, worker processes load the
missing samples ahead of need, and `map`, if there is one, runs here.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from torchcache2.core.errors import OptionError, UnserialisableError
from torchcache2.core.keys import Positions
from torchcache2.core.private import pytree
from torchcache2.core.process import before_pools_end, place
from torchcache2.core.rows import Leaf, Parts, Rows, Schema, merged
from torchcache2.core.values import leaves_of, mapped, specs_of
from torchcache2.datasets.identity import as_array
from torchcache2.datasets.mapped import MappedStore
from torchcache2.datasets.recipe import Recipe
from torchcache2.datasets.source import Source
from torchcache2.datasets.store import Store
from torchcache2.engine.values.kinds import NumpyArray
from torchcache2.engine.values.outputs import ItemRows, found, joined, output_of
from torchcache2.engine.values.samples import Samples, from_rows
from torchcache2.files.layout import schema_text
from torchcache2.files.schema import schema_from_json
from torchcache2.identity.encoding import digest

_AHEAD = 2  # blocks that are read before they are needed
_BLOCK, _MOST_TOGETHER = 8 << 20, 32  # most bytes, and most batches, of a block
_CPU = torch.device("cpu")
_NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}


class _Indices(Dataset[Any]):
    """Stands in for a dataset of `length` samples: each is its index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: Sequence[int]) -> Sequence[int]:
        return indices


class _Loading(Dataset[Any]):
    """Loads samples in a worker, which sends them as rows: these are few tensors."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._source: Source | None = None  # made in the worker, as `_samples` is

    def __getitems__(self, indices: Sequence[Any]) -> tuple[list[Any], dict[int, Any], bool]:
        if self._source is None:
            self._source, self._samples = self._recipe.source(), Samples()
        samples, is_steady = self._source.load(indices)
        batch = self._samples.to_rows(samples)
        parts, others = [], set(batch.refused)
        for positions, rows in batch.parts:
            try:
                parts.append((positions, schema_text(rows.schema), rows.columns))
            except UnserialisableError:
                others.update(positions.tolist())
        return parts, {i: samples[i] for i in others}, is_steady


def _as_it_is(batch: Any) -> Any:
    return batch


class _Block:
    """Some coming batches, whose rows are read together.

    Attributes
    ----------
    indices : ndarray, shape (n,)
        Of all of their samples, from `as_array`.
    parts : list of tuple
        The rows that were found, after `wait`.
    tiers : ndarray of int, shape (n,)
        The tier that each was found in; -1: none.
    computation : Computation or None
        With a map, the call that asks for all of them; None if it cannot be cached.
    """

    def __init__(
        self,
        indices: Positions,
        computation: Any,
        found: Callable[[], list[Parts]],
        drops: Callable[[], Any],
    ) -> None:
        self.indices, self.computation = indices, computation
        self._drops, self._before = drops, drops()
        self._found: Callable[[], list[Parts]] | None = found
        self.tiers = np.full(len(indices), -1)
        self.parts: Parts = []

    def read_by(self, thread: ThreadPoolExecutor) -> None:
        """Have a thread read the rows."""
        assert self._found is not None
        self._found = thread.submit(self._found).result

    def wait(self) -> None:
        """Return once its rows are read."""
        if self._found is None:
            return
        by_tier, self._found = self._found(), None
        for depth, parts in enumerate(by_tier):
            for positions, _ in parts:
                self.tiers[positions] = depth
        self.parts = [(where, found(rows)) for where, rows in merged(list(chain.from_iterable(by_tier)))]
        if len(self.parts) > 1 and (self.tiers >= 0).all():
            rows = joined(self.parts, len(self.indices), device=_CPU)
            if rows is not None:
                self.parts = [(np.arange(len(rows)), rows)]

    def is_current(self) -> bool:
        """Whether no rows were dropped since, such as stale ones."""
        return bool(self._drops() == self._before)

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return sum(len(rows) * rows.schema.row_bytes for _, rows in self.parts)


class _Plan:
    """A coming batch: the samples of a block from `start` to `end`."""

    def __init__(self, block: _Block, start: int, end: int) -> None:
        self.block, self.start, self.end = block, start, end
        self.is_fed = False  # whether workers load its missing samples

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def indices(self) -> list[Any]:
        """The indices of its samples."""
        indices: list[Any] = self.block.indices[self.start : self.end].tolist()
        return indices

    def missing(self) -> list[int]:
        """The indices of samples that have no row, each once."""
        absent = self.block.tiers[self.start : self.end] < 0
        return list(dict.fromkeys(self.block.indices[self.start : self.end][absent].tolist()))

    def rows(self) -> Rows | None:
        """The rows of the batch, if they stack, and all were found."""
        start, end = self.start, self.end
        if start == end or (self.block.tiers[start:end] < 0).any():
            return None
        parts = self.block.parts
        if len(parts) == 1 and len(parts[0][0]) == len(self.block.indices):
            rows = parts[0][1]
            if isinstance(rows, ItemRows):
                return rows.take(torch.arange(start, end, device="cpu"))
            return Rows(rows.schema, [column[start:end] for column in rows.columns], len(self))
        some = []
        for positions, rows in parts:
            where = np.flatnonzero((positions >= start) & (positions < end))
            if len(where):
                some.append((positions[where] - start, rows.take(torch.from_numpy(where))))
        return joined(some, len(self), device=_CPU)


class Loader:
    """The batches of a `CachedDataset`, in the order, and with the content, of a `DataLoader`'s.

    See `CachedDataset.loader`. Attributes are those of the `DataLoader` that gives the order.

    Attributes
    ----------
    epoch : int
        The number of the next epoch.
    are_variants : bool
        Whether the sampler draws from all variants of samples.
    """

    are_variants = False

    def __init__(
        self,
        dataset: Any,
        *,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        pin_memory: bool | None,
        device: str | torch.device | None,
        rank: int | None,
        world_size: int | None,
        workers: dict[str, Any],
        **order: Any,
    ) -> None:
        self.dataset, self.num_workers, self.collate_fn = dataset, num_workers, collate_fn
        self.device = None if device is None else torch.device(device)
        is_cuda = self.device is not None and self.device.type == "cuda"
        self.pin_memory = (is_cuda if pin_memory is None else pin_memory) and torch.cuda.is_available()
        self.epoch = self._done = 0
        # The states of the generators as the epoch was asked for, and as its first batch was.
        self._before: list[Tensor] = []
        self._random: list[Tensor] = []
        self._resumes = False
        self._workers = workers
        self._stackings: dict[Schema, Callable[[Rows], Any]] = {}
        indices, where = _Indices(len(dataset)), place()
        self._own: DistributedSampler[Any] | None = None  # its epochs are ours
        rank = where.rank if rank is None else rank
        world_size = where.world_size if world_size is None else world_size
        if world_size > 1 and order["sampler"] is None and order["batch_sampler"] is None:
            seed = 0 if order["generator"] is None else order["generator"].initial_seed()
            order["sampler"] = self._own = DistributedSampler(
                indices,
                world_size,
                rank,
                shuffle=bool(order.pop("shuffle")),
                seed=seed,
                drop_last=order["drop_last"],
            )
        if order["batch_size"] is None and order["batch_sampler"] is None:
            raise OptionError("batch_size=None: a loader makes batches; for single samples, use dataset[i]")
        self._order: DataLoader[Any] = DataLoader(indices, **order)
        # Draws from the generator what a `DataLoader` draws as an epoch begins.
        self._seeding: DataLoader[Any] = DataLoader(indices, batch_sampler=[], generator=order["generator"])
        DataLoader(indices, num_workers=num_workers, **workers)  # raises for what it does not know
        batches: Any = self._order.batch_sampler
        samplers: dict[int, Any] = {
            id(one): one for one in (self._order.sampler, batches, getattr(batches, "sampler", None))
        }
        self._samplers = [one for one in samplers.values() if hasattr(one, "set_epoch")]
        found = [self._order, *samplers.values()]
        generators = [torch.default_generator, *(getattr(one, "generator", None) for one in found)]
        self._generators = [
            *{id(one): one for one in generators if isinstance(one, torch.Generator)}.values()
        ]

    def __len__(self) -> int:
        return len(self._order)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._order, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, also of samplers that have one."""
        self.epoch = epoch
        for sampler in self._samplers:
            sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the current epoch is, for `load_state_dict` of an equal loader, also in another process."""
        random = self._random if self._done else [one.get_state() for one in self._generators]
        epochs = [getattr(sampler, "epoch", self.epoch) for sampler in self._samplers]
        before = self._before if self._done else random
        found = {"epoch": self.epoch, "batches": self._done, "before": before, "random": random}
        return found | {"samplers": epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next epoch begin after the batches that came before a `state_dict`."""
        self.epoch, self._done, self._random = state["epoch"], state["batches"], state["random"]
        self._before, self._resumes = state["before"], self._done > 0
        for sampler, epoch in zip(self._samplers, state["samplers"], strict=True):
            sampler.set_epoch(epoch)
        for generator, random in zip(self._generators[1:], self._random[1:], strict=True):
            generator.set_state(random)

    def __iter__(self) -> Iterator[Any]:
        ours, before = self._generators[0], self._generators[0].get_state()
        if self._resumes:  # a sampler may draw now, or when its first batch is asked for
            for generator, random in zip(self._generators, self._before, strict=True):
                generator.set_state(random)
        else:
            self._before = [generator.get_state() for generator in self._generators]
        batches: Any = self._order.batch_sampler
        drawn = map(list, iter(batches))
        iter(self._seeding)
        if not self._resumes:
            self._done = 0
            self.epoch = self.epoch if self._own is None else self._own.epoch
        else:
            for generator, random in zip(self._generators, self._random, strict=True):
                generator.set_state(random)
            for _ in range(self._done):
                next(drawn, None)
            ours.set_state(before)  # others' numbers go on from where they were
        self._resumes = False
        return self._batches(drawn, self._done, self.epoch)

    def _batches(self, drawn: Iterator[list[int]], done: int, epoch: int) -> Iterator[Any]:
        if done == 0:
            self._random = [generator.get_state() for generator in self._generators]
        with contextlib.closing(_Reading(self, drawn, self._random)) as reading:
            for batch in reading:
                self._done = done = done + 1
                yield batch
        self._done, self.epoch = 0, epoch + 1
        if self._own is not None:
            self._own.set_epoch(self.epoch)

    def made(self, plan: _Plan, ready: dict[int, Any]) -> Any:
        """A batch; workers have loaded the samples in `ready`."""
        dataset = self.dataset
        source, transform = dataset._source, dataset._recipe.transform
        is_plain = transform is None and self.collate_fn is None
        rows = plan.rows() if is_plain and plan.block.is_current() else None
        for batch in self._found(plan, rows) if rows is not None else ():
            return batch
        with source.holding(ready):
            if is_plain and dataset._recipe.map is not None:
                return dataset._output(plan.indices)
            return (self.collate_fn or default_collate)(dataset._samples(plan.indices))

    def _found(self, plan: _Plan, rows: Rows) -> list[Any]:
        """The batch of these rows in a list; empty if it must be made in another way."""
        store, block, batches = self.dataset._store, plan.block, list[Any]()
        if isinstance(store, MappedStore) and store.is_making:
            if block.computation is not None:
                batches = store.mapped.found(block.computation, slice(plan.start, plan.end), rows)  # type: ignore[union-attr]
        elif self.dataset._recipe.is_mapped:
            batches = [output_of(rows, device=_CPU)]
        elif store is not None and not store.is_verifying and (stacked := self._stacked(rows)) is not None:
            batches = [stacked]
        if batches and store is not None:
            counts = np.bincount(block.tiers[plan.start : plan.end]).tolist()
            tiers = zip(store.levels.tiers, counts, strict=False)
            store.tally.add(**{f"{tier.name}_hits": count for tier, count in tiers})
        return batches

    def _stacked(self, rows: Rows) -> Any:
        """What `default_collate` makes of these samples; None if it is not known how."""
        known = self._stackings.get(rows.schema)
        if known is None:
            known = self._stackings[rows.schema] = stacking(rows)
        return known(rows)


class _Reading:
    """One epoch of a loader: the batches that come, their rows, and the workers that load samples."""

    def __init__(self, loader: Loader, drawn: Iterator[list[int]], random: list[Tensor]) -> None:
        self._loader, self._drawn, self._random = loader, drawn, random
        self._plans = deque[_Plan]()
        self._unfed = deque[_Plan]()
        self._samples: Iterator[Any] | None = None
        self._together = 1  # batches whose rows are read together
        self._thread: ThreadPoolExecutor | None = None
        if self._store is not None and any(tier.is_lasting for tier in self._store.levels.tiers):
            self._thread = ThreadPoolExecutor(1, "torchcache2 loader")
            before_pools_end(self.close)  # later, at the end of the interpreter, it would fail

    @property
    def _store(self) -> Store | None:
        return self._loader.dataset._store  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        while True:
            while len(self._plans) <= (_AHEAD * self._together if self._thread else 0) and self._draw():
                pass
            if not self._plans:
                return
            plan = self._plans[0]
            plan.block.wait()
            if self._samples is None and self._loader.num_workers and plan.missing():
                self._start()
            self._plans.popleft()
            if not plan.is_fed:
                self._unfed.popleft()
            ready = self._loaded(plan) if plan.is_fed else {}
            yield self._placed(self._loader.made(plan, ready))
            size = plan.block.nbytes * len(plan) // max(1, len(plan.block.indices))
            self._together = max(1, min(_MOST_TOGETHER, _BLOCK // max(1, size)))

    def close(self) -> None:
        """End the thread and the workers."""
        thread, self._thread, self._samples = self._thread, None, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def _draw(self) -> bool:
        """Plan some more batches; False if there are none."""
        loader, recipe = self._loader, self._loader.dataset._recipe
        drawn = islice(self._drawn, self._together)
        if loader.are_variants:
            batches = [as_array(one) for one in drawn]
        else:
            batches = [recipe.variants(one, loader.epoch) for one in drawn]
        if not batches:
            return False
        indices, store, computation = np.concatenate(batches), self._store, None
        found: Callable[[], list[Parts]] = list
        drops: Callable[[], Any] = int
        if store is not None:
            levels = store.levels
            if isinstance(store, MappedStore) and store.is_making:
                computation = store.mapped.asked(indices)  # type: ignore[union-attr]
            keys = levels.keys(indices) if computation is None else computation.keys
            found = lambda: list(levels.found(keys)) if self._store is store else []  # noqa: E731
            drops = functools.partial(levels.drops, keys.namespace)
        block, start = _Block(indices, computation, found, drops), 0
        if store is not None and self._thread is not None:
            block.read_by(self._thread)
        for one in batches:
            plan = _Plan(block, start, start := start + len(one))
            self._plans.append(plan)
            self._unfed.append(plan)
        if self._thread is None:
            block.wait()
        return True

    def _start(self) -> None:
        """Start the workers."""
        loader = self._loader
        workers: DataLoader[Any] = DataLoader(
            _Loading(loader.dataset._recipe),
            batch_sampler=_Once(self._feed()),
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(self._seed()),  # others' generators must not advance
            **loader._workers,
        )
        self._samples = iter(workers)

    def _seed(self) -> int:
        """A seed for what the samples draw in workers, another one in each epoch."""
        states = [random.numpy().tobytes() for random in self._random]
        return int.from_bytes(digest([*states, str(self._loader._done).encode()])[:7], "little")

    def _feed(self) -> Iterator[list[int]]:
        """The missing samples of each batch, for the workers, as far ahead as these want."""
        while self._unfed or self._draw():
            plan = self._unfed.popleft()
            plan.is_fed = True
            plan.block.wait()
            yield plan.missing()

    def _loaded(self, plan: _Plan) -> dict[int, Any]:
        """The samples that the workers have loaded for a batch, by index."""
        assert self._samples is not None
        parts, others, is_steady = next(self._samples)
        missing, ready = plan.missing(), {}
        for positions, text, columns in parts:
            rows = Rows(schema_from_json(json.loads(text)), columns, len(positions))
            for position, sample in zip(positions.tolist(), from_rows(rows, shares=True), strict=True):
                ready[missing[position]] = sample
        ready |= {missing[position]: sample for position, sample in others.items()}
        if not is_steady and self._store is not None:
            self._store.moved(missing[0], None)
        return ready

    def _placed(self, batch: Any) -> Any:
        loader = self._loader
        if loader.device is None and not loader.pin_memory:
            return batch

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf.pin_memory() if loader.pin_memory and leaf.device == _CPU else leaf
            return leaf if loader.device is None else leaf.to(loader.device, non_blocking=loader.pin_memory)

        return mapped(place, batch, objects=True)


def filled(
    dataset: Any, absent: Sequence[int], *, num_workers: int, batch_size: int
) -> Iterator[tuple[int, int, int]]:
    """Make what is missing; how many of each batch were found and made, and the bytes of their rows.

    `NotCachedError` if it is not kept.
    """
    store = dataset._store
    order = {"sampler": absent, "generator": torch.Generator(), "rank": 0, "world_size": 1}
    loader = dataset.loader(batch_size, num_workers=num_workers, **order)
    loader.are_variants = True
    counters, left = store.mapped.engine.counters, len(absent)
    before = counters.misses
    for batch in loader:
        store.mapped.raise_if_bypassed()
        count, made, before = min(batch_size, left), counters.misses - before, counters.misses
        left -= count
        size = sum(leaf.nbytes for leaf in leaves_of(batch, objects=True) if isinstance(leaf, Tensor))
        yield count - made, made, size


class _Once:
    """A sampler that can be read once."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def stacking(rows: Rows) -> Callable[[Rows], Any]:
    """Makes of n rows of this schema what `default_collate` makes of their samples; None: that is unknown.

    Rows are columns already; what is still to be known are the containers, which are those of one sample.
    """
    schema = rows.schema
    kinds, specs = set[Any](), [schema.structure]
    for spec in specs:  # grows meanwhile
        kinds.add(spec.type)
        specs += specs_of(spec)
    are_known = all(leaf.kind == "tensor" or leaf.kind in _NUMBERS for leaf in schema.leaves)
    if not (kinds <= {None, tuple, list, dict, NumpyArray} and are_known and schema.leaves):
        return _unknown
    one = default_collate(from_rows(Rows(schema, [column[:1] for column in rows.columns], 1)))
    leaves, structure = pytree.tree_flatten(one)

    def stacked(rows: Rows) -> Any:
        columns = [_column(leaf, column) for leaf, column in zip(schema.leaves, rows.columns, strict=True)]
        return pytree.tree_unflatten(columns, structure)

    first, _ = pytree.tree_flatten(stacked(Rows(schema, [column[:1] for column in rows.columns], 1)))
    forms = [
        [(type(leaf), leaf.dtype, leaf.shape) for leaf in some if type(leaf) is Tensor]
        for some in (leaves, first)
    ]
    return stacked if forms[0] == forms[1] and len(forms[0]) == len(leaves) else _unknown


def _unknown(rows: Rows) -> None:
    return None


def _column(leaf: Leaf, column: Tensor) -> Tensor:
    if leaf.kind != "tensor":
        return column.contiguous().view(_NUMBERS[leaf.kind]).view(len(column))
    column = column if leaf.stored is leaf.dtype else column.to(leaf.dtype)
    return column.movedim(-1, 1) if leaf.channels_last else column
