"""What every tier does: one suite for all of them."""

import collections
import contextlib
import enum
import functools
import os

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from tests.helpers.outputs import assert_same
from tests.helpers.storage import (
    CPU,
    DTYPES,
    NAMESPACES,
    NEVER,
    found,
    keys_of,
    put,
    rows_of,
    value_of,
    wait_until,
    warnings_of,
)
from tests.helpers.threads import run_at_once
from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.engine.values import outputs
from torchcache2.engine.values.samples import Samples
from torchcache2.tiers.base import Signals


def fewer(n, test):
    """A test of which one in n cases is quick."""

    @pytest.mark.one_in(n)
    @functools.wraps(test)
    def run(*args, **options):
        return test(*args, **options)

    return run


def settled(tier):
    tier.flush()


def unsettled(tier):
    """Rows stay where `put` left them."""


def only(found):
    """The one part of what was found, as the output that it stands for."""
    ((positions, rows),) = found.parts
    return positions.tolist(), rows.to_pytree(device=CPU)


def put_output(tier, names, output, namespace=NAMESPACES[0]):
    return tier.put(keys_of(names, namespace), Rows.from_pytree(output, len(names), device=CPU))


class TierContract:
    """A subclass has a fixture `make`, a callable that makes a tier with room for 100 MB.

    It takes `queue`, bytes that may wait to be written, and `delay`, seconds until they are; a tier that
    writes nothing ignores them.

    Attributes
    ----------
    is_of_others : bool
        Whether others keep rows where the tier does, and may have them forgotten. Its bytes are then not all
        its own, and it keeps what it is given, be it there already.
    """

    is_of_others = False

    @pytest.fixture
    def tier(self, make):
        return make()

    @pytest.fixture(params=[settled, unsettled], ids=["flushed", "waiting"])
    def settle(self, request):
        return request.param

    def test_a_new_tier_has_nothing(self, tier):
        assert tier.put(keys_of([]), Rows.from_pytree(torch.empty(0, 4), 0, device=CPU)) == 0
        tier.flush()
        assert found(tier, range(3)) == []
        assert len(tier.get(keys_of([])).parts) == 0
        stats = tier.stats()
        assert (stats.rows, stats.evictions, stats.corrupt, stats.faults) == (0, 0, 0, 0)
        assert stats.bytes == 0 or self.is_of_others

    def test_what_was_put_is_found(self, tier, settle):
        assert put(tier, range(100), 32) == 100
        settle(tier)
        assert found(tier, range(100), 32) == list(range(100))
        assert tier.stats().rows == 100

    def test_a_tier_says_which_keys_have_rows(self, tier, settle):
        put(tier, range(0, 60, 2), 5)
        put(tier, [61], 7)
        put(tier, range(10), 5, NAMESPACES[1])
        settle(tier)
        names = np.random.default_rng(0).permutation(120).tolist()
        here = tier.has(keys_of(names))
        assert here.dtype == bool and here.shape == (120,)
        assert here.tolist() == [name in (*range(0, 60, 2), 61) for name in names]
        assert tier.has(keys_of([3, 3, 99], NAMESPACES[1])).tolist() == [True, True, False]
        assert tier.has(keys_of(range(3), NAMESPACES[2])).tolist() == [False] * 3
        assert tier.has(keys_of([])).shape == (0,)
        tier.drop(NAMESPACES[0])
        assert not tier.has(keys_of(names)).any()

    def test_any_subset_in_any_order_with_keys_that_are_not_there(self, tier, settle):
        put(tier, range(0, 60, 2))
        put(tier, range(100, 110))
        settle(tier)
        generator = np.random.default_rng(0)
        for size in (1, 2, 7, 60):
            names = generator.permutation(120)[:size].tolist()
            expected = sorted(name for name in names if name in range(0, 60, 2) or name in range(100, 110))
            assert found(tier, names) == expected
        assert found(tier, [4, 0, 4, 1, 4, 1, 2]) == [0, 2, 4, 4, 4]  # asked for twice

    def test_rows_that_are_there_are_not_kept_again(self, tier, settle):
        assert put(tier, [1, 2]) == 2
        settle(tier)
        assert put(tier, [2, 3]) == 1 or self.is_of_others
        settle(tier)
        assert put(tier, [3, 1, 2]) == 0 or self.is_of_others
        assert tier.stats().rows == 3
        assert found(tier, [1, 2, 3]) == [1, 2, 3]

    def test_keys_that_differ_in_one_bit_are_others(self, tier, settle):
        data = np.random.default_rng(0).integers(0, 256, (1, 16), dtype=np.uint8)
        tier.put(Keys(NAMESPACES[0], data), rows_of([0], 4))
        settle(tier)
        near = np.repeat(data, 128, axis=0)
        near[np.arange(128), np.arange(128) // 8] ^= (1 << np.arange(128) % 8).astype(np.uint8)
        assert len(tier.get(Keys(NAMESPACES[0], near)).parts) == 0
        assert len(tier.get(Keys(NAMESPACES[0], data)).parts) == 1

    def test_drop_forgets_one_namespace(self, tier, settle):
        for namespace, width in zip(NAMESPACES[:2], (3, 5), strict=True):
            put(tier, [1, 2], width, namespace)
        settle(tier)
        assert found(tier, [1, 2, 3], 3, NAMESPACES[0]) == [1, 2] and found(tier, [1], 3, NAMESPACES[2]) == []
        tier.let_go(NAMESPACES[2])
        tier.drop(NAMESPACES[0])
        tier.drop(NAMESPACES[2])
        assert found(tier, [1, 2], 3, NAMESPACES[0]) == []
        assert found(tier, [1, 2], 5, NAMESPACES[1]) == [1, 2]
        assert tier.stats().rows == 2
        assert put(tier, [2, 3], namespace=NAMESPACES[0]) == 2
        settle(tier)
        assert found(tier, [1, 2, 3], namespace=NAMESPACES[0]) == [2, 3]

    def test_rows_of_several_schemas_come_back_by_schema(self, tier, settle):
        outputs = {
            "a": torch.rand(4, 3),
            "b": {"x": torch.rand(4, 3).double(), "y": (torch.arange(4), None, 2.5, "text")},
            "c": [torch.rand(4, 2, 5).bfloat16(), b"bytes", True],
            "d": torch.rand(4, 0),
        }
        for name, output in outputs.items():
            assert put_output(tier, [(name, i) for i in range(4)], output) == 4
        settle(tier)
        asked = [(name, i) for i in (3, 0, 2) for name in "adcbz"]
        parts = tier.get(keys_of(asked)).parts
        assert len(parts) == 4
        seen = []
        for positions, rows in parts:
            names = {asked[position][0] for position in positions}
            assert len(names) == 1
            name = names.pop()
            chosen = [asked[position][1] for position in positions]
            expected = Rows.from_pytree(outputs[name], 4, device=CPU)
            assert rows.schema == expected.schema
            for column, whole in zip(rows.columns, expected.columns, strict=True):
                assert torch.equal(column, whole[chosen])
            seen += positions.tolist()
        assert sorted(seen) == [i for i, (name, _) in enumerate(asked) if name != "z"]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_comes_back_bit_by_bit(self, tier, settle, dtype):
        expected = {}
        for shape in [(), (0,), (3,), (2, 3)]:
            size = 6 * int(np.prod(shape)) * dtype.itemsize
            data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
            names = [(shape, i) for i in range(6)]
            assert put_output(tier, names, data.view(dtype).view(6, *shape)) == 6
            expected[shape] = data.view(6, -1)[[4, 1, 1]]
        settle(tier)
        for shape, data in expected.items():
            positions, output = only(tier.get(keys_of([(shape, 4)])))
            assert output.dtype == dtype and output.shape == (1, *shape)
            assert torch.equal(output.contiguous().view(-1).view(torch.uint8).view(1, -1), data[:1])
            positions, output = only(tier.get(keys_of([(shape, i) for i in (4, 6, 1, 1)])))
            assert positions == [0, 2, 3]
            assert output.dtype == dtype and output.shape == (3, *shape)
            assert torch.equal(output.contiguous().view(-1).view(torch.uint8).view(3, -1), data)

    @pytest.mark.parametrize(
        "output",
        [torch.empty(3, 0), {"x": torch.empty(3, 2, 0), "y": None}, {"y": None}, ()],
        ids=["bare", "tree", "none", "nothing"],
    )
    def test_rows_without_bytes_are_rows(self, tier, settle, output):
        assert put_output(tier, range(3), output) == 3
        settle(tier)
        for names, found_at in [([2, 5, 0], [0, 2]), ([1], [0])]:
            positions, back = only(tier.get(keys_of(names)))
            assert positions == found_at
            expected = tree_map(lambda x: x if x is None else x[: len(found_at)], output)  # noqa: B023
            assert_same(back, expected)
        assert tier.stats().rows == 3

    def test_stored_dtypes_come_back_as_the_outputs_own(self, tier, settle):
        output = torch.randn(5, 8)
        tier.put(keys_of(range(5)), Rows.from_pytree(output, 5, device=CPU, dtype=torch.bfloat16))
        settle(tier)
        _, back = only(tier.get(keys_of(range(5))))
        assert back.dtype == torch.float32 and torch.equal(back, output.bfloat16().float())

    def test_ragged_rows_come_back_by_shape(self, tier, settle):
        lengths = [5, 1, 3, 1, 0, 5, 64]
        for number, length in enumerate(lengths):
            output = {
                "tokens": torch.full((2, length, 3), float(number)),
                "mask": torch.ones(2, length).bool(),
            }
            assert put_output(tier, [(number, 0), (number, 1)], output) == 2
        settle(tier)
        asked = [(number, 1) for number in range(len(lengths))] + ["unknown"]
        parts = tier.get(keys_of(asked)).parts
        assert sorted(position for positions, _ in parts for position in positions.tolist()) == list(range(7))
        for positions, rows in parts:
            output = rows.to_pytree(device=CPU)
            for position, tokens, mask in zip(
                positions.tolist(), output["tokens"], output["mask"], strict=True
            ):
                assert tokens.shape == (lengths[position], 3) and (tokens == position).all()
                assert mask.shape == (lengths[position],) and mask.all()

    def test_outputs_with_an_entry_for_each_item(self, tier, settle):
        lists, names = outputs.Lists(Samples(), {"['e']": True}), list(range(9))

        def output(names):
            entries = [{"t": torch.arange(n % 3), "a": np.full(n % 2, n, ">i4"), "s": str(n)} for n in names]
            return {"e": entries, "x": torch.tensor(names), "a": np.array(names) / 2, "s": "b"}

        rows = outputs.rows_of(output(names), len(names), lists, device=CPU)
        parts = outputs.stored(rows)
        assert len(parts) == 6  # one of each shape
        assert sum(tier.put(keys_of([names[i] for i in where]), part) for where, part in parts) == 9
        settle(tier)
        for asked in ([4, 8, 0, 4], names):
            parts = [(where, outputs.found(part)) for where, part in tier.get(keys_of(asked)).parts]
            together = outputs.joined(parts, len(asked), device=CPU)
            assert_same(output(asked), outputs.output_of(together, device=CPU))

    def test_a_batch_is_one_part_however_it_was_put(self, tier, settle):
        for start in range(0, 40, 8):
            put(tier, range(start, start + 8))
            settle(tier)
        names = np.random.default_rng(0).permutation(40).tolist()
        positions, output = only(tier.get(keys_of(names)))
        assert positions == list(range(40))
        assert torch.equal(output, torch.stack([value_of(name, 4) for name in names]))

    @pytest.mark.parametrize("form", [torch.channels_last, torch.channels_last_3d], ids=str)
    def test_channels_last_is_kept(self, tier, settle, form):
        shape = (6, 3, 4, 5) if form is torch.channels_last else (6, 3, 2, 4, 5)
        output = torch.randn(shape).relu().to(memory_format=form)
        put_output(tier, range(6), output)
        settle(tier)
        _, back = only(tier.get(keys_of([5, 0, 2])))
        assert torch.equal(back, output[[5, 0, 2]])
        assert back.is_contiguous(memory_format=form) and not back.is_contiguous()
        assert back.stride() == output[[5, 0, 2]].to(memory_format=form).stride()

    def test_layouts_that_differ_share_rows(self, tier, settle):
        output = torch.randn(6, 3, 4, 5)
        put_output(tier, range(3), output[:3].to(memory_format=torch.channels_last))
        put_output(tier, range(3, 6), output[3:])
        settle(tier)
        seen = 0
        for positions, rows in tier.get(keys_of(range(6))).parts:
            assert torch.equal(rows.to_pytree(device=CPU), output[positions])
            seen += len(positions)
        assert seen == 6

    @pytest.mark.parametrize("view", ["transposed", "expanded", "strided", "reversed"])
    def test_rows_that_are_views_are_copied_as_they_look(self, tier, settle, view):
        base = torch.randn(8, 6)
        output = {
            "transposed": base.t()[:4],
            "expanded": base[:1].expand(4, 6),
            "strided": base[::2, ::3],
            "reversed": base.flip(1)[2:6],
        }[view]
        expected = output.clone()
        put_output(tier, range(4), output)
        base.zero_()
        settle(tier)
        _, back = only(tier.get(keys_of(range(4))))
        assert torch.equal(back, expected)

    def test_the_callers_tensors_may_change_after_put(self, tier, settle):
        output = torch.rand(3, 5)
        keys = keys_of(range(3))
        keys = Keys(keys.namespace, keys.data.copy())
        expected = output.clone()
        tier.put(keys, Rows.from_pytree(output, 3, device=CPU))
        output.zero_()
        keys.data[:] = 0
        settle(tier)
        _, back = only(tier.get(keys_of(range(3))))
        assert torch.equal(back, expected)
        assert len(tier.get(keys).parts) == 0

    def test_results_are_the_callers_own(self, tier, settle):
        put(tier, range(3))
        settle(tier)
        ((_, first),) = tier.get(keys_of(range(3))).parts
        ((_, second),) = tier.get(keys_of([0, 0, 1])).parts
        first.columns[0].fill_(7)
        second.columns[0].add_(1)
        assert (first.columns[0] == 7).all()
        assert found(tier, range(3)) == [0, 1, 2]

    def test_results_of_inference_mode_can_be_written_later(self, tier, settle):
        with torch.inference_mode():
            put(tier, [1, 2])
            settle(tier)
            ((_, rows),) = tier.get(keys_of([1, 2])).parts
            output = rows.to_pytree(device=CPU)
        put(tier, [3])
        output.add_(1)
        assert not output.is_inference()
        assert found(tier, [1, 2, 3]) == [1, 2, 3]

    def test_claims_are_free_when_nobody_else_has_one(self, tier):
        keys = keys_of(range(5))
        claim = tier.claim(keys)
        assert claim.mine.tolist() == [0, 1, 2, 3, 4] and len(claim.others) == 0
        put(tier, range(3))
        assert len(claim.wait()) == 0
        claim.release()
        claim.release()
        assert tier.claim(keys_of([3, 4])).mine.tolist() == [0, 1]
        assert tier.claim(keys_of([])).mine.tolist() == []

    def test_a_closed_tier_has_nothing_and_keeps_nothing(self, tier, settle):
        put(tier, [1, 2])
        settle(tier)
        tier.close()
        assert found(tier, [1, 2]) == []
        assert not tier.has(keys_of([1, 2])).any()
        assert put(tier, [3]) == 0
        tier.flush()
        tier.drop(NAMESPACES[1])
        tier.close()
        assert tier.stats().rows == 0

    def test_stats_count_rows_and_bytes(self, tier):
        before = tier.stats().bytes
        put(tier, range(100), 2_500)  # far more than the buffers of clients that a server counts
        tier.flush()
        stats = tier.stats()
        assert stats.rows == 100
        assert 200_000 < stats.bytes - before < 2_000_000
        put(tier, range(100, 200), 2_500, NAMESPACES[1])
        tier.flush()
        assert tier.stats().rows == 200
        assert tier.stats().bytes > stats.bytes
        assert tier.stats().evictions == 0

    @pytest.mark.parametrize("limit", [8_000, 10**8], ids=["often", "seldom"])
    def test_threads_that_put_get_flush_and_drop(self, make, limit):
        # The limit makes the disk tier seal, and wait for it, often or seldom.
        options = {"queue": limit, "delay": NEVER}
        tier = make(**options)

        def work(number):
            generator, namespace = np.random.default_rng(number), NAMESPACES[number % 2]
            for _ in range(16):
                names = generator.choice(300, 16, replace=False).tolist()
                here = set(found(tier, names, 8, namespace))
                absent = [name for name in names if name not in here]
                assert 0 <= put(tier, absent, 8, namespace) <= len(absent)
                assert found(tier, names, 8, namespace) == sorted(names)
                if generator.random() < 0.1:
                    tier.flush()
                tier.stats()

        def drop():
            for _ in range(8):
                put(tier, range(50), 3, NAMESPACES[2])
                tier.drop(NAMESPACES[2])
                assert found(tier, range(50), 3, NAMESPACES[2]) == []

        run_at_once(drop, *[functools.partial(work, number) for number in range(4)])
        tier.flush()
        for number in range(2):
            here = found(tier, range(300), 8, NAMESPACES[number])
            assert len(here) > 200
        stats = tier.stats()
        assert stats.faults == stats.corrupt == 0

    def test_close_while_other_threads_use_the_tier(self, make):
        tier = make()

        def work(number):
            for first in range(0, 400, 4):
                put(tier, range(first, first + 4), 8, NAMESPACES[number])
                found(tier, range(first, first + 4), 8, NAMESPACES[number])

        run_at_once(tier.close, *[functools.partial(work, number) for number in range(3)])
        assert put(tier, ["late"]) == 0 and found(tier, ["late"]) == []


class LaterContract:
    """What tiers do that write rows later. A subclass has two fixtures.

    `make` makes tiers that write to one place, as another process would each; it takes `delay` and `signals`.
    `there` tells which of the names up to 20 have a row in this place.
    """

    def test_rows_wait_and_can_be_read_meanwhile(self, make, there):
        tier = make()
        for first in (0, 5):
            assert put(tier, range(first, first + 5)) == 5
            assert found(tier, range(12)) == list(range(first + 5)) and there() == list(range(first))
            for _ in range(2):
                tier.flush()
                assert found(tier, range(12)) == there() == list(range(first + 5))

    def test_rows_are_written_after_a_while(self, make, there):
        tier = make(delay=0.02)
        for name in range(3):
            put(tier, [name])
            wait_until(lambda name=name: there() == list(range(name + 1)))

    def test_rows_are_written_at_close(self, make, there):
        tier = make()
        put(tier, range(10))
        tier.close()
        assert there() == list(range(10))

    def test_rows_that_others_need_are_written_at_once(self, make, there):
        epochs = [0]
        tier = make(signals=Signals(asked=lambda: epochs[0]))
        put(tier, [1])
        epochs[0] = 1
        wait_until(lambda: there() == [1])

    def test_what_waits_is_forgotten_when_another_process_drops_rows(self, make, there):
        drops = [0]
        tier = make(signals=Signals(drops=lambda: drops[0]))
        put(tier, [1, 2])
        put(tier, [1], namespace=NAMESPACES[1])
        drops[0] = 1
        assert found(tier, [1, 2]) == [] and not tier.has(keys_of([1])).any()
        tier.flush()
        assert there() == [] and tier.stats().rows == 0

    def test_rows_get_there_where_a_drop_waits_for_them(self, make, there):
        drops, seen = [0], []

        @contextlib.contextmanager
        def publishing():
            before = there()
            yield
            seen.append((before, there()))

        @contextlib.contextmanager
        def dropped_just_before():
            drops[0] += 1
            yield
            assert there() == [1, 2]  # none came, to be deleted again

        for context in (publishing, dropped_just_before):
            tier = make(signals=Signals(drops=lambda: drops[0], publishing=context))
            put(tier, [1, 2] if context is publishing else [3])
            tier.close()
            assert (seen, there()) == ([([], [1, 2])], [1, 2])

    def test_a_forked_child_begins_with_nothing_and_its_parent_writes_what_waited(self, make, there):
        tier = make()
        put(tier, [1, 2])
        pid = os.fork()
        if pid == 0:  # nothing may be raised here, as pytest would go on in the child
            code = 1
            with contextlib.suppress(BaseException):
                code = 2 * (found(tier, [1, 2]) != []) + 4 * (put(tier, [3]) != 1)
                code += 8 * (found(tier, [3]) != [3])
                tier.flush()
                code += 16 * (there() != [3])
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        tier.look_again(NAMESPACES[0])
        assert found(tier, [1, 2, 3]) == [1, 2, 3]
        tier.flush()
        assert there() == [1, 2, 3]

    def test_outputs_that_cannot_be_written_down_are_told_once(self, make, log):
        class Local(dict):
            pass

        class Kept(enum.Enum):
            ONE = 1

        torch.utils._pytree.register_pytree_node(
            Local, lambda node: (list(node.values()), Kept.ONE), lambda values, context: Local(x=values[0])
        )
        tier, pair = make(), collections.namedtuple("Pair", "x y")
        for output in [Local(x=torch.rand(2, 3)), pair(torch.rand(2, 3), 1)] * 2:
            for namespace in NAMESPACES:
                assert put_output(tier, range(2), output, namespace) == 0
        put(tier, range(3))
        tier.flush()
        assert found(tier, range(3)) == [0, 1, 2]
        assert len(warnings_of(log)) == 1 and tier.stats().faults == 0
