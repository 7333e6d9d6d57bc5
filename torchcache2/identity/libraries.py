"""Code of libraries: patched installed code, torch's operators and graphs, and what is left out."""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchcache2.core.private import (
    CUSTOM_OPERATORS,
    OPERATOR_CODE,
    OPERATOR_DEFINITION,
    REGISTERED_KERNELS,
)
from torchcache2.identity.names import taken_by
from torchcache2.identity.sourcecode import (
    CompiledTexts,
    Origins,
    cells_of,
    defining_module,
    functions_in,
    names_in,
    origin,
)

_LARGEST_REGISTRY = 1000


class InstalledCode:
    """Follows installed code by name, to code that other packages or the user have put into it.

    Installed code counts by its package, torch's by name. That does not cover replaced globals and
    methods, or code in registries that it names, such as ``ALL_ATTENTION_FUNCTIONS`` of transformers.
    """

    def __init__(self, origins: Origins, texts: CompiledTexts) -> None:
        self.found: dict[str, Any] = {}  # the user's code, by where it was found
        self.registries: list[dict[Any, Any]] = []  # dicts to which more code may be added
        # Names of code, with the globals or the class that contain them, by its id.
        self.scopes: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self._origins, self._texts = origins, texts
        self._named: dict[int, Any] = {}
        self._reached: dict[int, tuple[set[str], list[types.FunctionType]]] = {}

    def reach(self, kind: type) -> set[str]:
        """Follow the forwards of a class and its bases through their package; returns every name used."""
        bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
        queue = list(self._methods(bases, {"forward"}))
        names: set[str] = set()
        seen = set(map(id, queue))
        is_installed = self._origins.of(kind) == "installed"
        while queue:
            function = queue.pop()
            own, reached = self._reached_by(function)
            for other in [*reached, *self._methods(bases, own - names)]:
                root = other.__globals__.get("__name__", "").partition(".")[0]
                is_near = is_installed or other.__globals__ is function.__globals__
                if id(other) not in seen and is_near and root == kind.__module__.partition(".")[0]:
                    seen.add(id(other))
                    queue.append(other)
            names |= own
        return names

    def names(self, start: types.FunctionType | type) -> set[str]:
        """Every name that a function or class takes, and the installed code that it names."""
        queue: list[Any] = [start]
        names: set[str] = set()
        while queue:
            one = queue.pop()
            if id(one) in self._named or self._origins.of(one) != "installed":
                continue
            self._named[id(one)] = one
            if isinstance(one, type):
                values = [value for base in one.__mro__ for value in vars(base).values()]
            else:
                own = self._texts.once(taken_by, one.__code__)
                names |= own
                values = [scope[name] for scope, name in _globals_of(one, own)] + _captured(one)
            queue += [inner for value in values for inner in functions_in(value)]
        return names

    def _methods(self, bases: list[type], names: set[str]) -> Iterator[types.FunctionType]:
        for base in bases:
            for name in names & vars(base).keys():
                value = vars(base)[name]
                if callable(value) or hasattr(type(value), "__get__"):
                    self._watch(base, name)
                yield from functions_in(value)

    def _reached_by(self, function: types.FunctionType) -> tuple[set[str], list[types.FunctionType]]:
        """The names that a function takes, and the functions that these stand for."""
        if id(function) in self._reached:
            return self._reached[id(function)]
        names = names_in(function.__code__)
        values = [*_captured(function), getattr(function, "__wrapped__", None)]
        for scope, name in _globals_of(function, names):
            value, where = scope[name], f"{scope.get('__name__', '')}.{name}"
            for registry in self._registries(scope, name):
                for key, code in list(registry.items()):
                    if self._origins.is_project(code):
                        place = repr(key) if isinstance(key, (str, int)) else "…"
                        self.found[f"{where}[{place}]"] = code
            if callable(value):
                self._watch(scope, name)
                if self._origins.is_project(value):
                    self.found[where] = value
                else:
                    values.append(value)
        found = names, [inner for value in values for inner in functions_in(value)]
        self._reached[id(function)] = found
        return found

    def _registries(self, scope: dict[str, Any], name: str) -> Iterator[dict[Any, Any]]:
        """The dicts in which a global keeps registered values, if not known yet."""
        value = scope[name]
        places: list[tuple[Any, str]] = [(scope, name)] if isinstance(value, dict) else []
        if isinstance(value, Mapping) and not isinstance(value, (dict, type)):
            owners = [getattr(value, "__dict__", {}), *type(value).__mro__]
            contents = [(owner, list(_scope_of(owner).items())) for owner in owners]
            places = [(owner, key) for owner, items in contents for key, one in items if type(one) is dict]
        for owner, place in places:
            self._watch(owner, place)
            registry = _scope_of(owner)[place]
            if len(registry) <= _LARGEST_REGISTRY and not any(registry is one for one in self.registries):
                self.registries.append(registry)
                yield registry

    def _watch(self, owner: type | dict[str, Any], name: str) -> None:
        self.scopes.setdefault(id(owner), (_scope_of(owner), set()))[1].add(name)


def _scope_of(owner: type | dict[str, Any]) -> Mapping[str, Any]:
    return vars(owner) if isinstance(owner, type) else owner


def _globals_of(function: types.FunctionType, names: set[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the globals with these names are; follows modules among them."""
    scopes = [function.__globals__]
    for scope in scopes:  # grows meanwhile
        for name in names & scope.keys():
            if not isinstance(scope[name], types.ModuleType):
                yield scope, name
            elif not any(vars(scope[name]) is one for one in scopes):
                scopes.append(vars(scope[name]))


def _captured(function: types.FunctionType) -> list[Any]:
    values = [value for _, _, value in cells_of(function)]
    return [value for value in values if isinstance(value, types.FunctionType)]


_OVERLOAD = type(torch.ops.aten.add.Tensor)
OPERATORS = (_OVERLOAD, type(torch.ops.aten.add), OPERATOR_DEFINITION)
OPERATOR_NAMESPACES = (type(torch.ops), type(torch.ops.aten), type(torch.ops.higher_order))
# Kernels for these dispatch keys do not compute outputs.
_NO_KERNELS = ("Meta", "Autograd", "ADInplace", "Tracer", "Functionalize")
_OF_TORCH = ("aten", "prim", "prims", "quantized", "torch", "c10d", "_c10d_functional", "higher_order")


def is_operator(value: Any) -> bool:
    """Whether a value is an operator, or the definition of one."""
    return isinstance(value, OPERATORS)


def operator_name(value: Any) -> str:
    """``namespace::name`` of an operator."""
    if isinstance(value, OPERATOR_DEFINITION):
        return str(value).removeprefix("<CustomOpDef(").removesuffix(")>")
    namespace, name = str(value).split(".")[:2]
    return f"{namespace}::{name}"


def definition(value: Any) -> dict[str, Any] | None:
    """The code registered for an operator of `torch.library.custom_op`; None if it cannot be read."""
    is_definition = isinstance(value, OPERATOR_DEFINITION)
    found = value if is_definition else CUSTOM_OPERATORS.get(operator_name(value))
    return None if found is None or not vars(found).keys() >= {*OPERATOR_CODE} else vars(found)


def registered_otherwise(name: str) -> bool:
    """Whether an operator has registered Python code that we have no reference to."""
    namespace, _, short = name.partition("::")
    if namespace in _OF_TORCH:
        return False
    if REGISTERED_KERNELS is None:
        return True
    # A copy, as the garbage collector may meanwhile remove a dead library's kernels.
    keys = [key.split("/") for key in list(REGISTERED_KERNELS)]
    return any(
        key[0] == namespace and key[1].partition(".")[0] == short and not key[-1].startswith(_NO_KERNELS)
        for key in keys
        if len(key) > 2
    )


def graph_code(graph: torch.fx.Graph) -> list[Any]:
    """The code of a graph, and the values that it names."""
    code = graph.python_code("self")
    return [code.src, sorted(code.globals.items())]


# Left out of namespaces: attributes of these classes, or keys of mappings. No forward of these packages reads
# them, and they differ between runs that compute the same. In ``attribute.key``, only this key of the dict
# ``attribute`` is left out.
_OF_TOKENIZERS = ("name_or_path", "vocab_file", "tokenizer_file")
# Memos of words and of prompts: packages read and fill them, but no output depends on what is in them.
_MEMOS = ("cache", "_prompt_length_mapping")
_LEFT_OUT = {
    # Python's hash of a text, which differs between processes; tells save_pretrained of changes.
    ("transformers", "GenerationConfig"): ("_original_object_hash",),
    # Where it was loaded from; weights and vocabularies count by content, classes by code. The others are
    # those of the model that saves the configuration.
    ("transformers", "PreTrainedConfig"): ("_name_or_path", "architectures", "dtype"),
    ("transformers", "PretrainedConfig"): (
        "_name_or_path",
        "architectures",
        "torch_dtype",
    ),  # before version 5
    # The second notes an earlier request for hidden states; see `without_captures`.
    ("transformers", "PreTrainedModel"): ("name_or_path", "_output_capturing_hooks_installed", "model_tags"),
    ("transformers", "PreTrainedTokenizerBase"): (
        *_OF_TOKENIZERS,
        *[f"init_kwargs.{name}" for name in _OF_TOKENIZERS],
        "cache",  # only slow ones have it
    ),
    ("clip", "SimpleTokenizer"): ("cache",),
    ("open_clip", "SimpleTokenizer"): ("cache",),
    # The second is a list in the order of a set, which differs between processes; read while loading a
    # config.
    ("diffusers", "FrozenDict"): ("_name_or_path", "_use_default_values"),
    ("peft", "PeftConfigMixin"): ("base_model_name_or_path",),
    ("sentence_transformers", "Transformer"): ("_prompt_length_mapping",),
    # What `similarity` computes with, set by its first call, and notes for the model's card.
    **dict.fromkeys(
        [("sentence_transformers", f"{name}Encoder") for name in ("Cross", "Sparse", "MultiVector")]
        + [("sentence_transformers", "SentenceTransformer")],
        (
            *("_similarity", "_similarity_pairwise", "_similarity_fn_name"),
            *("model_card_data", "_model_card_text", "_model_card_vars"),
        ),
    ),
    # A count of the hooks of the process, to remove one; hooks count where they run.
    ("torch", "RemovableHandle"): ("id", "hooks_dict_ref", "extra_dict_ref"),
    # Tools' notes about a graph; its code counts.
    ("torch", "GraphModule"): (
        *("_code", "_graph", "_lineno_map", "_prologue_start", "_tracer_cls", "_tracer_extras"),
        *("_create_node_hooks", "_erase_node_hooks", "_replace_hooks", "_deepcopy_hooks"),
        *("meta", "range_constraints", "shape_env"),
    ),
    # Raises if arguments differ from the exported ones, and returns nothing.
    ("torch", "GuardsFn"): ("forward",),
}
# Compiled Python functions: only the function and the options count, as the object refers to its compiler.
_COMPILERS = {
    ("numba", "Dispatcher"): ("py_func", "targetoptions"),
    ("numba", "DUFunc"): ("__wrapped__", "targetoptions"),
}
_CLASSES = frozenset(name for _, name in [*_LEFT_OUT, *_COMPILERS])
_CALLED = ("forward",)  # the package calls it, but ignores its result
# These packages use such names only to save and describe models, not to compute.
RELATED = ("accelerate", "diffusers", "peft", "sentence_transformers", "transformers")


def left_out(kind: type) -> list[str]:
    """The attributes and keys that are left out of instances of a class, unless code names them."""
    return _listed(_LEFT_OUT, kind)


def counts_by(kind: type) -> list[str]:
    """The attributes that stand for an object of a class; none for most: there, all state counts."""
    return _listed(_COMPILERS, kind)


def _listed(table: Mapping[tuple[str, str], tuple[str, ...]], kind: type) -> list[str]:
    """The names in a table for a class of an installed package, and its bases."""
    return [
        name
        for base in kind.__mro__
        if base.__qualname__ in _CLASSES and origin(base) in ("installed", "torch")
        for name in table.get((defining_module(base).partition(".")[0], base.__qualname__), ())
    ]


def is_named(attribute: str, own: Collection[str], others: Collection[str]) -> bool:
    """Whether code names what is left out: the project's, or, except for memos, of packages not `RELATED`."""
    last = attribute.rpartition(".")[2].lstrip("_")
    names = {last, f"_{last}", f"__{last}"} - {*_CALLED}
    return not names.isdisjoint(own if attribute in _MEMOS else {*own, *others})


def without_captures(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """The hooks of a module without those by which transformers collects hidden states.

    It sets them in the first call that requests hidden states; in other calls they do nothing. Duplicates,
    set for a model and for one around it, collect twice, so they count.
    """
    kept, collected = [], set()
    for key, hook in hooks.items():
        if getattr(hook, "__module__", None) == "transformers.utils.output_capturing":
            what = inspect.getclosurevars(hook).nonlocals.get("key")
            if what not in collected:
                collected.add(what)
                continue
        kept.append((key, hook))
    return kept
