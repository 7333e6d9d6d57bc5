"""Values that are given in place of tensors and lists: arrays, columns of tables, texts, images, objects."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from torchcache2 import torchcache

ORDERS = ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [1, 2], [3, 0, 4], [2, 2, 1], [0, 1, 2, 3, 4, 5])
TEXTS = ["a", "bb", "ccc", "dd", "e", "ffffff"]


def stats(function):
    return function.cache_instance.stats()


def chosen(values, order):
    return [values[place] for place in order]


def numbers(entries):
    return torch.tensor([float(sum(map(ord, repr(entry)))) for entry in entries])


# Arrays as batches.

ARRAYS = {
    kind: np.array([1, 0, 3, 2, 5, 1]).astype(kind)
    for kind in ("f4", "f2", "u1", "bool", "c8", ">i4", "datetime64[s]", "U3", "U200", "S3", "O")
}
ARRAYS |= {
    "wide": np.arange(6 * 300.0).reshape(6, 10, 30),
    "strided": np.arange(6 * 600).reshape(6, 600)[:, ::2],
    "transposed": np.arange(1800.0).reshape(300, 6).T,
    "backwards": np.arange(1800.0).reshape(6, 300)[::-1, ::-1],
    "records": np.array([(n, 2.0) for n in range(6)], [("a", "i4"), ("b", "f4")]),
}


def by_entry(x):
    return torch.tensor([[float(sum(map(ord, repr(row)))), x.dtype.itemsize] for row in x.tolist()])


@pytest.mark.parametrize("name", ARRAYS)
def test_the_items_of_arrays_are_computed_once(name):
    array = ARRAYS[name]
    function = torchcache(lambda x: by_entry(x))
    for order in ORDERS:
        assert torch.equal(function(array[order]), by_entry(array[order]))
        assert torch.equal(function(x=array[order]), by_entry(array[order]))
    distinct = len({row.tobytes() if name != "O" else row for row in array})
    assert (stats(function).misses, stats(function).bypasses) == (distinct, {})


def test_arrays_of_a_file_and_those_in_dicts_are_batches(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(24.0).reshape(6, 4))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")

    def plain(batch, *, scale=1.0, **others):
        return torch.from_numpy(batch["x"] * batch["y"][:, None] * scale + others["z"][:, None])

    function, y = torchcache(plain), np.arange(6)
    for order in ORDERS:
        call = {"batch": {"x": x[order], "y": y[order]}, "z": y[order] * 2}
        assert torch.equal(function(**call), plain(**call))
    assert (stats(function).misses, stats(function).bypasses) == (6, {})


def test_arrays_beside_tensors_count_for_the_whole_batch():
    x, table = torch.arange(6.0), np.ones(7)

    @torchcache
    def scaled(batch, table, whole):
        return batch["x"] * float(table.sum()) * torch.from_numpy(whole)

    for order in ORDERS:
        given = np.array(order, "f4")
        assert torch.equal(scaled({"x": x[order]}, table, given), x[order] * 7 * torch.from_numpy(given))
    # As long as the batch, `whole` may belong to the items or to the batch: both are assumed.
    assert (stats(scaled).hits, stats(scaled).bypasses) == (7, {})
    assert torch.equal(scaled({"x": x[[2, 1]]}, table * 2, np.ones(2, "f4")), x[[2, 1]] * 14)
    assert stats(scaled).hits == 7


def test_an_array_of_the_whole_batch_has_to_be_named_among_arrays(log):
    def plain(x, mean):
        return torch.from_numpy(x - mean)

    x, mean = np.arange(18.0).reshape(6, 3), np.ones(3)
    unnamed, named = torchcache(plain), torchcache(shared_args="mean")(plain)
    for order in ORDERS:
        assert torch.equal(unnamed(x[order], mean), plain(x[order], mean))
        assert torch.equal(named(x[order], mean), plain(x[order], mean))
    assert (stats(named).misses, stats(named).bypasses) == (6, {})
    assert set(stats(unnamed).bypasses) <= {"argument", "batch"} and "argument" in stats(unnamed).bypasses
    assert torch.equal(named(x, mean * 2), plain(x, mean * 2)) and stats(named).misses == 12


# Columns of tables.


def series(values):
    return pytest.importorskip("pandas").Series(values, name="text")


def labelled(values):
    return pytest.importorskip("pandas").Series(values, index=[f"row {v}" for v in values])


def arrow(values):
    return pytest.importorskip("pyarrow").array(values)


def chunked(values):
    return pytest.importorskip("pyarrow").chunked_array([values[:1], values[1:]])


def column(values):
    return pytest.importorskip("datasets").Dataset.from_dict({"text": values, "n": values})["text"]


def nested(values):
    rows = [{"text": value} for value in values]
    return pytest.importorskip("datasets").Dataset.from_dict({"meta": rows})["meta"]["text"]


@pytest.mark.parametrize("make", [series, labelled, arrow, chunked, column, nested])
def test_columns_of_tables_are_lists_with_one_entry_per_item(make, capsys):
    def plain(texts):
        print(type(texts).__name__)  # a set of types would be its state
        return numbers([str(text) for text in texts])

    function = torchcache(item_args="texts")(plain)
    for order in ORDERS:
        values = chosen(TEXTS, order)
        assert torch.equal(function(make(values)), numbers(values))
    assert (stats(function).misses, stats(function).bypasses) == (6, {})
    kinds = {type(make(TEXTS)).__name__} | ({"list"} if make is nested else set())
    assert set(capsys.readouterr().out.split()) == kinds


def test_the_labels_of_a_series_count_with_its_entries():
    pandas = pytest.importorskip("pandas")
    function = torchcache(item_args="s")(lambda s: torch.tensor(s.index.to_numpy() * 10 + s.to_numpy()))
    for labels in ([7, 3, 5], [3, 5, 7], [5, 5, 1]):
        given = pandas.Series([1, 2, 3], index=labels)
        wanted = [10 * label + n for label, n in zip(labels, (1, 2, 3), strict=True)]
        assert function(given).tolist() == wanted
    assert stats(function).bypasses == {}


@pytest.mark.parametrize("kind", ["categories", "a dictionary", "a subclass"])
def test_columns_with_more_than_entries_are_passed_through(kind):
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")

    class Own(pandas.Series):
        pass

    make = {
        "categories": lambda: pandas.Series(TEXTS).astype("category"),
        "a dictionary": lambda: pyarrow.array(TEXTS).dictionary_encode(),
        "a subclass": lambda: Own(TEXTS),
    }[kind]
    function = torchcache(item_args="texts")(lambda texts: numbers([str(text) for text in texts]))
    assert torch.equal(function(make()), numbers(TEXTS))
    assert list(stats(function).bypasses) == ["argument"]


# A single text.


@pytest.mark.parametrize("keys", [(0, 1, 2), ("a", "b", "c"), ((0,), (1,), (2,)), (0.5, None, torch.float)])
def test_which_of_a_dicts_tensors_are_one_counts(keys):
    @torchcache
    def last(d):
        return d[keys[-1]] * 1.0

    a, b = torch.rand(4, 3), torch.rand(4, 3)
    for third in (a, a, b):
        assert torch.equal(last(dict(zip(keys, (a, b, third), strict=True))), third)


@pytest.mark.parametrize(
    "output",
    [
        lambda text: torch.tensor(float(len(text))),
        lambda text: torch.arange(len(text)),  # of another shape for another text
        lambda text: {"length": len(text), "parts": list(text), "codes": np.frombuffer(text.encode(), "u1")},
        lambda text: text.upper(),
    ],
)
def test_functions_of_one_item_return_what_they_return_without_the_cache(output):
    @torchcache
    def of_one(text, *, size=(2, 3), scale=1):
        return output(text)

    for _ in range(2):
        for text in ("a", "two", "a"):
            for options in ({}, {"size": (4, 4)}, {"scale": 2}):
                assert repr(of_one(text, **options)) == repr(output(text))
                assert repr(of_one(text=text, **options)) == repr(output(text))
    assert (stats(of_one).hits, stats(of_one).misses, stats(of_one).bypasses) == (30, 6, {})


def test_a_function_of_a_file_is_computed_again_once_the_file_has_changed(tmp_path):
    @torchcache
    def content(path):
        with open(path, "rb") as file:
            return torch.tensor(list(file.read()))

    for name in (tmp_path / "a.txt", str(tmp_path / "b.txt")):
        for data in (b"one", b"three"):
            with open(name, "wb") as file:
                file.write(data)
            assert bytes(content(name).tolist()) == bytes(content(name).tolist()) == data
    assert (stats(content).hits, stats(content).misses) == (4, 4)


def test_calls_that_are_no_item_by_themselves_are_not_cached_as_one(log):
    kept = torch.ones(3)

    @torchcache
    def of_texts(texts, mode="sum"):
        return numbers(texts)

    @torchcache
    def of_pair(pair, mode):
        return pair[0] + pair[1]

    @torchcache
    def random(text):
        return torch.rand(3)

    @torchcache
    def global_of(name):
        kept.requires_grad_()
        return kept

    assert torch.equal(of_texts(["a", "b"], "sum"), numbers(["a", "b"]))
    assert stats(of_texts).bypasses == {"argument": 1}  # else the list would be one item
    for _ in range(2):
        assert of_pair((torch.ones(4, 1), torch.ones(4, 1)), "sum").sum() == 8
        assert not torch.equal(random("a"), random("a"))
        assert global_of("kept") is kept
    assert stats(of_pair).misses == 1 and stats(random).bypasses == {"random": 4}
    assert stats(global_of).misses == 0 and sum(stats(global_of).bypasses.values()) == 2


def test_a_single_text_beside_a_batch_belongs_to_all_of_it():
    function = torchcache(item_args=("texts", "prompt"))(
        lambda texts, prompt: numbers([prompt + t for t in texts])
    )
    for prompt in ("query: ", "passage: ", "query: "):
        assert torch.equal(function(TEXTS, prompt), numbers([prompt + text for text in TEXTS]))
    assert (stats(function).misses, stats(function).hits) == (12, 6)


# Lists of images.


# Modules, tokenizers and functions as arguments.


class Tokenizer:
    def __init__(self, step=1):
        self.step, self.words, self.most = step, {}, list(range(1000))

    def __call__(self, texts):
        return (
            torch.tensor([[float(ord(c) * self.step) for c in (t + "    ")[:4]] for t in texts])
            + self.most[5]
        )


@torch.no_grad()
def encode_prompt(prompts, encoders, tokenizers, finish=None):
    found = [encoder(tokenizer(prompts)) for encoder, tokenizer in zip(encoders, tokenizers, strict=True)]
    found = torch.cat(found, dim=1)
    return found if finish is None else finish(found)


def encoders():
    torch.manual_seed(0)
    return [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout()).eval() for _ in range(2)]


def twice(x):
    return x * 2


EDITS = {
    "nothing": (lambda models, tokenizers: None, 0),
    "a weight": (lambda models, tokenizers: models[1][0].weight.data.mul_(2), 6),
    "a weight in place": (lambda models, tokenizers: models[0][0].bias.detach().add_(1), 6),
    "other models": (lambda models, tokenizers: models.reverse(), 6),
    "an equal model": (lambda models, tokenizers: models.append(copy.deepcopy(models.pop())), 0),
    "a layer": (lambda models, tokenizers: models[0].append(torch.nn.ReLU().eval()), 6),
    "a hook": (lambda models, tokenizers: models[0].register_forward_hook(lambda *a: a[2] + 1), 6),
    "an attribute": (lambda models, tokenizers: setattr(tokenizers[0], "step", 2), 6),
    "one of a long list": (lambda models, tokenizers: tokenizers[1].most.__setitem__(5, 50), 6),
    "a tokenizer": (lambda models, tokenizers: tokenizers.__setitem__(0, Tokenizer(3)), 6),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", EDITS)
def test_modules_and_tokenizers_as_arguments_count_by_their_state(name):
    models, tokenizers = encoders(), [Tokenizer(), Tokenizer()]
    function = torchcache(item_args="prompts")(encode_prompt)
    for _ in range(3):
        assert torch.equal(function(TEXTS, models, tokenizers), encode_prompt(TEXTS, models, tokenizers))
    before = stats(function)
    assert (before.misses, before.bypasses) == (6, {})  # weights require grad, but not under its `no_grad`
    edit, misses = EDITS[name]
    edit(models, tokenizers)
    for _ in range(2):
        assert torch.equal(function(TEXTS, models, tokenizers), encode_prompt(TEXTS, models, tokenizers))
    assert (stats(function).misses - before.misses, stats(function).bypasses) == (misses, {})


def test_a_module_that_is_an_argument_steps_aside_for_what_a_cached_module_does():
    (model, _), x = encoders(), torch.ones(2, 4)
    function = torchcache(lambda x, model: model(x))
    function(x, model)
    assert list(stats(function).bypasses) == ["grad"]
    model.requires_grad_(False).train()
    function(x, model)
    assert list(stats(function).bypasses) == ["grad", "training"]
    model.eval()
    for _ in range(2):
        assert torch.equal(function(x, model), model(x))
    assert (stats(function).hits, stats(function).misses) == (3, 1)


class Counting(torch.nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.calls


def test_a_module_that_the_forward_changes_is_changed_as_without_a_cache():
    model, expected, x = Counting(), Counting(), torch.ones(2, 4)
    function = torchcache(lambda x, model: model(x))
    for _ in range(3):
        assert torch.equal(function(x, model), expected(x)) and model.calls == expected.calls
    assert list(stats(function).bypasses) == ["input"]


def test_an_edit_of_a_module_that_leaves_no_sign_is_noticed_some_calls_later():
    model = torch.nn.Linear(400, 400).requires_grad_(False)
    x, seen = torch.randn(6, 400), torch.randn(2, 400)
    function, expected = torchcache(lambda x, model: model(x)), model(x)
    for _ in range(3):
        function(seen, model)
    before = model.weight[390, 390].item()
    model.weight.data[390, 390] = 5
    function(x, model)  # its rows are kept as if the weights were those that were read
    for _ in range(30):
        found = function(seen, model)
    assert torch.allclose(found, model(seen), atol=1e-5)
    model.weight.data[390, 390] = before
    for _ in range(30):
        function(seen, model)
    assert torch.allclose(function(x, model), expected, atol=1e-5)


def test_functions_as_arguments_count_by_code_and_closure():
    function, x = torchcache(lambda x, finish: finish(x)), torch.arange(3.0)
    for number in (2, 3, 2):
        assert torch.equal(function(x, lambda x, by=number: x * by), x * number)
    assert torch.equal(function(x, twice), x * 2)
    assert (stats(function).misses, stats(function).hits, stats(function).bypasses) == (9, 3, {})


def test_a_module_that_was_an_argument_can_be_freed():
    models, tokenizers = encoders(), [Tokenizer(), Tokenizer()]
    function = torchcache(item_args="prompts")(encode_prompt)
    for _ in range(2):
        function(TEXTS, models, tokenizers)
    weights = weakref.ref(models[0][0].weight)
    models.clear()
    gc.collect()
    assert weights() is None and stats(function).hits == 6


def test_objects_with_random_generators_are_passed_through():
    function, x = torchcache(lambda x, draw: x + draw(3)), torch.ones(3)
    generator = torch.Generator().manual_seed(0)
    first = function(x, lambda n: torch.rand(n, generator=generator))
    assert not torch.equal(function(x, lambda n: torch.rand(n, generator=generator)), first)
    assert list(stats(function).bypasses) == ["argument"]


# Dicts that the forward fills.


class Filling(torch.nn.Module):
    def forward(self, features, factor=1):
        features["total"] = features["x"].sum(1) * factor
        features["width"] = features["x"].shape[1]
        return features


@pytest.mark.parametrize("probe", [True, False])
def test_a_dict_that_the_forward_fills_is_filled_with_what_is_found_too(probe):
    plain, x = Filling(), torch.arange(12.0).reshape(6, 2)
    module = torchcache(probe=probe)(Filling())
    for order in ([0, 1, 2], [2, 1, 0], [3, 0, 4, 5], [5, 5, 1], [0, 1, 2]):
        given, expected = {"x": x[order], "how": "sum"}, {"x": x[order], "how": "sum"}
        own = given["x"]
        assert module(given) is given and plain(expected) is expected
        assert given["x"] is own and list(given) == list(expected) and given["width"] == 2
        assert torch.equal(given["total"], expected["total"])
        assert given.keys() == module(features=dict(given), factor=2).keys()
    assert stats(module).bypasses == {} and stats(module).hits > 12


def test_mappings_of_a_tokenizer_are_filled_too():
    module, given = torchcache(Filling()), BatchEncoding({"x": torch.ones(3, 2)})
    for _ in range(2):
        given = BatchEncoding({"x": torch.ones(3, 2)})
        assert module(given) is given and given["total"].tolist() == [2, 2, 2]
    assert (stats(module).misses, stats(module).bypasses) == (1, {})


class Odd(torch.nn.Module):
    def forward(self, features, what):
        if what == "removes":
            features["y"] = features.pop("x") * 2
            return features
        if what == "reorders":
            x = features.pop("x")
            features["y"], features["x"] = x * 2, x
            return features
        if what == "returns another":
            features["y"] = features["x"] * 2
            return features["y"] + 1
        if what == "raises":
            features["y"] = 1
            raise ValueError(what)
        features["x"] *= 2
        return features


@pytest.mark.parametrize("what", ["removes", "reorders", "returns another", "raises", "writes"])
def test_a_dict_that_is_changed_otherwise_is_changed_as_without_a_cache(what):
    plain, module = Odd(), torchcache(Odd())
    for _ in range(3):
        given, expected = {"x": torch.ones(2, 2)}, {"x": torch.ones(2, 2)}
        if what == "raises":
            for one, values in ((plain, expected), (module, given)):
                with pytest.raises(ValueError, match="raises"):
                    one(values, what)
        else:
            output, wanted = module(given, what), plain(expected, what)
            assert (output is given) == (wanted is expected)
        assert list(given) == list(expected)
        assert all(
            torch.equal(*map(torch.as_tensor, pair))
            for pair in zip(given.values(), expected.values(), strict=True)
        )
    assert set(stats(module).bypasses) <= {"input"} and stats(module).hits == 0


def test_a_dict_that_is_put_in_itself_is_the_callers_own():
    @torchcache
    def function(given):
        given["self"] = given
        return given

    for _ in range(2):
        given = {"x": torch.ones(2, 2)}
        assert function(given) is given and given["self"] is given
    assert stats(function).bypasses == {"input": 4}


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


class Scale:
    def __init__(self, by):
        self.by = by

    def scaled(self, x):
        return x * self.by


@pytest.mark.parametrize("make", [Slotted, lambda by: Scale(by).scaled, lambda by: [{"a": Scale(by).scaled}]])
def test_callables_of_any_kind_are_right(make):
    def plain(x, scale):
        return (scale[0]["a"] if isinstance(scale, list) else scale)(x)

    function, x, kept = torchcache(plain), torch.arange(3.0), make(7)
    for by in (2, 3, 2):
        assert torch.equal(function(x, make(by)), x * by)
    assert torch.equal(function(x, kept), x * 7)
    owner = kept[0]["a"] if isinstance(kept, list) else kept
    getattr(owner, "__self__", owner).by = 8
    assert torch.equal(function(x, kept), x * 8)
    seen = stats(function)
    assert (seen.hits, seen.bypasses) == ((0, {"argument": 15}) if make is Slotted else (3, {}))
