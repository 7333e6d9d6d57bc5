"""Namespaces that another process finds again, and what is left out to that end."""

import json
import shutil
import threading
import typing
import weakref

import pytest
import torch
from torch import nn

from tests.helpers import stable, warm
from tests.helpers.outputs import namespace as named
from tests.helpers.outputs import warnings_in
from tests.helpers.stable import Net, Outer, Thing, holding, plain
from torchcache2 import torchcache

TRACED = "ignore:.*torch.jit"
X = torch.rand(4, 3)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What two processes say, with other hash seeds, folders and histories."""
    running = []
    for seed, folder, history in (("1", "here", "0"), ("random", "some/where/else", "3")):
        place = tmp_path_factory.mktemp("stable") / folder
        place.mkdir(parents=True)
        shutil.copy(stable.__file__, place / "stable.py")
        running.append(warm.start(place / "stable.py", history, cwd=place, seed=seed))
    return [json.loads(process.done(timeout=300).out) for process in running]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", stable.MAKERS)
def test_another_process_finds_the_namespace(name, processes):
    left, right = (found[name] for found in processes)
    assert left == right and left[1] == []


# What is left out.


CONFIGS = """
from collections import OrderedDict

class FrozenDict(OrderedDict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)
"""


@pytest.fixture
def frozen_dict(installed):
    return installed("diffusers", CONFIGS).FrozenDict


class Configured(nn.Module):
    def __init__(self, config, **attributes):
        super().__init__()
        self.config = config
        vars(self).update(attributes)

    def forward(self, x):
        return x * self.config.rate


def two_of(make, frozen_dict):
    return [named(make(frozen_dict(rate=2, _use_default_values=values))) for values in ([3, 5], [5, 3])]


def test_what_no_forward_reads_is_left_out(frozen_dict):
    left, right = two_of(Configured, frozen_dict)
    assert left == right
    assert named(Configured(frozen_dict(rate=3, _use_default_values=[3, 5]))) != left


def test_a_users_class_of_that_name_is_not_on_the_table():
    space = {}
    exec(CONFIGS, space)
    left, right = two_of(Configured, space["FrozenDict"])
    assert left != right


def test_where_weights_came_from_is_left_out(installed):
    space = installed(
        "transformers",
        "import torch\nclass PreTrainedConfig: pass\nclass PreTrainedTokenizerBase: pass\n"
        "class PreTrainedModel(torch.nn.Module):\n    def forward(self, x): return x\n",
    )

    def make(place):
        model, model.config, tokens = space.PreTrainedModel(), space.PreTrainedConfig(), None
        model.gradient_checkpointing = place == "b"
        model.name_or_path = model.config._name_or_path = place
        model.tokens = tokens = space.PreTrainedTokenizerBase()
        tokens.name_or_path, tokens.init_kwargs = place, {"name_or_path": place, "lower": place == "c"}
        return model

    assert named(make("a")) == named(make("b")) != named(make("c"))


def test_what_saving_and_comparing_sets_is_left_out(installed):
    lines = "import torch\nclass Config: pass\nclass PreTrainedConfig: pass\n"
    config = installed("transformers", lines).PreTrainedConfig()
    text = (
        "import torch\nclass SentenceTransformer(torch.nn.Module):\n    def encode(self, x): return x * 2\n"
    )
    model = installed("sentence_transformers", text).SentenceTransformer()
    model.config, model.model_card_data, model._similarity_pairwise = config, {"saved": False}, None
    torchcache(model, methods=("encode",))
    before = model.cache_instance.module_hash
    model.model_card_data, model._similarity_pairwise = {"saved": True}, torch.nn.functional.cosine_similarity
    config.dtype, config.architectures = "float32", ["Bert"]
    assert model.cache_instance.module_hash == before


def test_hooks_by_which_transformers_collects_hidden_states_are_left_out_unless_they_are_there_twice():
    def collecting(key):
        def hook(module, args, output):
            return print(key)

        hook.__module__ = "transformers.utils.output_capturing"
        return hook

    def with_hooks(*hooks):
        net = Outer(Net())
        for hook in hooks:
            net.inner.register_forward_hook(hook)
        return named(net)

    once = with_hooks(collecting("hidden_states"), collecting("attentions"))
    assert with_hooks() == once != with_hooks(print)
    assert with_hooks(collecting("hidden_states"), collecting("hidden_states")) != once


def test_patterns_of_the_library_regex_count_by_their_text():
    regex = pytest.importorskip("regex")
    patterns = [
        regex.compile(r"[\p{L}]+"),
        regex.compile(r"[\p{N}]+"),
        regex.compile(r"[\p{L}]+", regex.IGNORECASE),
        regex.compile(r"\L<words>", words=["a"]),
        regex.compile(r"\L<words>", words=["b"]),
    ]
    assert len({named(holding(pattern)) for pattern in patterns}) == 5


# Graphs.


def test_graphs_differ_by_code_and_weights():
    net = Net()
    graph = torch.fx.symbolic_trace(net)
    names = [named(Outer(graph))]
    net.layer.weight.data.add_(1)
    names.append(named(Outer(torch.fx.symbolic_trace(net))))
    net.rate = 0.2
    names.append(named(Outer(torch.fx.symbolic_trace(net))))
    assert len(set(names)) == 3


def multiply(graph, factor):
    node = next(node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(node):
        made = graph.graph.call_function(torch.mul, (node.args[0], factor))
    node.args = (made,)


@pytest.mark.parametrize("wrap", [Outer, lambda graph: graph])
def test_an_edited_graph_is_noticed_when_it_is_compiled(wrap):
    graph = torch.fx.symbolic_trace(plain())
    module, expected = torchcache(wrap(graph)), plain()(X)
    for _ in range(2):
        assert torch.equal(module(X), expected)
    assert module.cache_instance.stats().hits == len(X)
    multiply(graph, 3.0)
    assert torch.equal(module(X), expected)  # as without a cache
    graph.recompile()
    assert torch.equal(module(X), expected * 3)


def test_an_interpreter_runs_the_graph_as_it_is_now():
    graph = torch.fx.symbolic_trace(plain())
    before = named(stable.Interpreted(graph))
    multiply(graph, 3.0)
    assert named(stable.Interpreted(graph)) != before


def test_functions_that_a_graph_calls_count_by_source():
    def make(function):
        graph = torch.fx.Graph()
        graph.output(graph.call_function(function, (graph.placeholder("x"),)))
        return Outer(torch.fx.GraphModule(nn.Module(), graph))

    def once():
        def function(x):
            return x + 1

        return function

    def twice():
        def function(x):
            return x + 2

        return function

    assert named(make(once())) == named(make(once())) != named(make(twice()))


@pytest.mark.slow
@pytest.mark.filterwarnings(  # of torch 2.4, as it exports
    "ignore:Attempted to insert a get_attr Node", "ignore:Node .* does not reference an nn.Module"
)
def test_an_exported_program_is_cached_and_its_weights_are_watched(log):
    module = torchcache(probe=False)(stable.exported())  # for two items, so that none is computed alone
    expected = module(X[:2])
    assert torch.equal(module(X[:2]), expected) and module.cache_instance.stats().hits == 2
    with torch.no_grad():
        module.offset.add_(1)
    torch.testing.assert_close(module(X[:2]), expected + 1)
    assert warnings_in(log) == []


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated",
    "ignore:Please use quant_min",
    "ignore:torch.quantize_per_tensor",
)
@pytest.mark.cpu_only
def test_quantized_graphs(log):
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    def make(scale):
        with torch.random.fork_rng():
            prepared = quantize_fx.prepare_fx(plain(), get_default_qconfig_mapping(), (X,))
            prepared(X * scale)
            return Outer(quantize_fx.convert_fx(prepared))

    assert named(make(1)) == named(make(1)) != named(make(2))
    assert [text for text in warnings_in(log) if "cannot read" in text] == []


# Scripted and compiled children.


@pytest.mark.filterwarnings(TRACED)
@pytest.mark.parametrize("script", [torch.jit.script, lambda net: torch.jit.freeze(torch.jit.script(net))])
def test_what_has_a_scripted_module_is_passed_through(script, log):
    module, net = torchcache(Outer(script(Net().eval().requires_grad_(False)))), Net().eval()
    for rate in (0.5, 0.5, 0.3):
        if script is torch.jit.script:
            module.inner.rate = net.rate = rate
        torch.testing.assert_close(module(X), net(X))
    assert module.cache_instance.stats().bypasses == {"unreadable": 3 * len(X)}
    (text,) = warnings_in(log)
    assert "inner is a module of torch.jit" in text and "cache the original" in text


@pytest.mark.filterwarnings(TRACED)
def test_scripted_functions_count_in_this_process_only(monkeypatch, log):
    def double(x):
        return x * 2

    module = torchcache(stable.CallsScripted())
    for function in map(torch.jit.script, (stable.shift, double)):
        monkeypatch.setattr(stable, "SCRIPTED", function)
        for _ in range(2):
            assert torch.equal(module(X), function(X))
    assert module.cache_instance.stats().hits == 2 * len(X)
    assert all("cannot read SCRIPTED" in text for text in warnings_in(log)) and warnings_in(log)


@pytest.mark.slow
def test_a_compiled_child_is_the_module_that_it_compiles():
    net = Net().eval().requires_grad_(False)
    compiled = torch.compile(net, backend="eager")
    module = torchcache(Outer(compiled))
    before = module.cache_instance.module_hash
    expected = module(X)
    assert module.cache_instance.module_hash == before
    assert torch.equal(module(X), expected) and module.cache_instance.stats().hits == len(X)
    net.rate = 0.7
    assert torch.equal(module(X), net(X))
    assert not torch.equal(module(X), expected)


# Types, sets, storages.


def test_types_are_told_apart():
    others = [int | str, list[str], dict[str, int], dict, typing.ForwardRef("Sooner"), typing.Literal["b"]]
    variables = [typing.TypeVar("T", bound=int), typing.TypeVar("U"), typing.ParamSpec("T"), stable.P.kwargs]
    values = [*stable.TYPES, *others, *variables]
    assert len({named(holding(value)) for value in values}) == len(values)
    assert named(holding(typing.Optional[int])) == named(holding(int | None))  # noqa: UP045


def test_sets_are_told_apart():
    values = [{Thing(1), Thing(2)}, {Thing(1), Thing(3)}, {(1, Thing)}, {(1, Net)}, {torch.sin}, {torch.cos}]
    assert len({named(holding(value)) for value in values}) == len(values)
    loop = Thing(1)
    loop.value = {loop, Thing(2)}
    assert named(holding(loop)) == named(holding(loop))


# What has another content in each thread, or as long as something else lives.

STATE = threading.local()


class ByThread(nn.Module):
    def forward(self, x):
        return x * getattr(STATE, "scale", 1)


def test_each_threads_content_counts(log):
    module = torchcache(ByThread())
    found = {}

    def run(scale):
        STATE.scale = scale
        found[scale] = [module(X), module(X)]

    assert torch.equal(module(X), X) and warnings_in(log) == []
    for scale in (2, 3, 2):
        thread = threading.Thread(target=run, args=(scale,))
        thread.start()
        thread.join()
        assert all(torch.equal(y, X * scale) for y in found[scale])
    assert torch.equal(module(X), X)
    assert len(warnings_in(log)) == 1 and "cannot read STATE" in warnings_in(log)[0]


class Mine(threading.local):
    scale = 2


def kept(container, *content):
    KEYS.extend(content)
    for value in content:
        container.add(value) if isinstance(container, weakref.WeakSet) else container.update({value: value})
    return container


KEYS = []
UNREADABLE = {
    "subclass of local": Mine,
    "weak set": lambda: kept(weakref.WeakSet(), Thing(1)),
    "weak keys": lambda: kept(weakref.WeakKeyDictionary(), Thing(1)),
    "weak values": lambda: kept(weakref.WeakValueDictionary(), Thing(1)),
    "storage": lambda: torch.ones(3).untyped_storage(),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_fleeting_is_unreadable(name, log):
    assert named(holding(UNREADABLE[name]())) != named(holding(UNREADABLE[name]()))
    assert all("cannot read" in text for text in warnings_in(log)) and warnings_in(log)


def test_the_same_of_an_installed_package_is_not(installed, log):
    made = installed(
        "caching",
        "import threading\nclass Made:\n    def __init__(self):\n        self.kept = threading.local()\n",
    )
    value = made.Made()
    value.kept.state = object()
    assert named(holding(value)) == named(holding(made.Made())) and warnings_in(log) == []


def test_a_weak_container_that_fills_is_noticed(log):
    container = weakref.WeakKeyDictionary()
    module = torchcache(holding(container))
    before = module.cache_instance.module_hash
    kept(container, Thing(1))
    assert module.cache_instance.module_hash != before and len(warnings_in(log)) == 1
