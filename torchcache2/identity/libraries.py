"""What is known of the objects of torch, Python and other libraries, and what of them is left out of keys."""

from __future__ import annotations

import enum
import functools
import inspect
import pathlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from gc import get_referents
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchcache2.core.errors import attribute
from torchcache2.core.private import (
    BATCH_NORMS,
    CUSTOM_OPERATORS,
    DROPOUTS,
    FSDP_MARK,
    FSDP_MODULES,
    OPERATOR_CODE,
    OPERATOR_DEFINITION,
    buffers_of,
    parameters_of,
)
from torchcache2.identity.encoding import Encoder, digest
from torchcache2.identity.names import is_plain
from torchcache2.identity.sourcecode import defining_module, origin

_OVERLOAD = type(torch.ops.aten.add.Tensor)
OPERATORS = (_OVERLOAD, type(torch.ops.aten.add), OPERATOR_DEFINITION)
OPERATOR_NAMESPACES = (type(torch.ops), type(torch.ops.aten), type(torch.ops.higher_order))


def code_of_operator(value: Any) -> list[Any]:
    """The functions of an operator of `torch.library.custom_op`; empty for others."""
    name = "::".join(str(value).split(".")[:2])
    definition = value if isinstance(value, OPERATOR_DEFINITION) else CUSTOM_OPERATORS.get(name)
    return [getattr(definition, field, None) for field in OPERATOR_CODE] if definition is not None else []


def graph_code(graph: torch.fx.Graph) -> list[Any]:
    """The code of a graph, and the values that it names."""
    code = graph.python_code("self")
    return [code.src, sorted(code.globals.items())]


# Left out of namespaces: attributes of these classes, or keys of mappings. No forward of these packages reads
# them, and they differ between runs that compute the same. In ``attribute.key``, only this key of the dict
# ``attribute`` is left out.
_OF_TOKENIZERS = ("name_or_path", "vocab_file", "tokenizer_file")
_LEFT_OUT = {
    ("pydantic", "Decorator"): ("cls_ref",),  # a text with the address of the class
    # Python's hash of a text, which differs between processes; tells save_pretrained of changes.
    ("transformers", "GenerationConfig"): ("_original_object_hash",),
    # Where it was loaded from; weights and vocabularies count by content, classes by code. The others are
    # those of the model that saves the configuration.
    ("transformers", "PreTrainedConfig"): ("_name_or_path", "architectures", "dtype"),
    # Before version 5.
    ("transformers", "PretrainedConfig"): ("_name_or_path", "architectures", "torch_dtype"),
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
# Objects of which only some attributes count: compiled functions refer to their compiler, and trees' nodes,
# which they pickle, have pointers.
_COUNTED = {
    ("numba", "Dispatcher"): ("py_func", "targetoptions"),
    ("numba", "DUFunc"): ("__wrapped__", "targetoptions"),
    ("scipy", "cKDTree"): ("data", "indices", "leafsize", "boxsize"),
}
# Whether the backward pass computes parts of a model again, and by which function: outputs are the same.
_CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")
_CLASSES = frozenset(name for _, name in [*_LEFT_OUT, *_COUNTED])


def left_out(kind: type) -> list[str]:
    """The attributes and keys that are left out of instances of a class."""
    package = defining_module(kind).partition(".")[0]
    is_theirs = package in ("diffusers", "transformers") and origin(kind) == "installed"
    return [*_listed(_LEFT_OUT, kind), *(_CHECKPOINTING if is_theirs else ())]


def counts_by(kind: type) -> list[str]:
    """The attributes that stand for an object of a class; none for most: there, all state counts."""
    return _listed(_COUNTED, kind)


def _listed(table: Mapping[tuple[str, str], tuple[str, ...]], kind: type) -> list[str]:
    """The names in a table for a class of an installed package, and its bases."""
    return [
        name
        for base in kind.__mro__
        if base.__qualname__ in _CLASSES and origin(base) in ("installed", "torch")
        for name in table.get((defining_module(base).partition(".")[0], base.__qualname__), ())
    ]


def without_captures(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """The hooks of a module without those by which transformers collects hidden states.

    It sets them in the first call that requests hidden states; in other calls they do nothing. Duplicates,
    set for a model and for one around it, collect twice, so they count.
    """
    kept, collected = [], set()
    for key, hook in hooks.items():
        if attribute(hook, "__module__") == "transformers.utils.output_capturing":
            what = inspect.getclosurevars(hook).nonlocals.get("key")
            if what not in collected:
                collected.add(what)
                continue
        kept.append((key, hook))
    return kept


# What `functools.lru_cache` keeps for a function: a model that it has loaded, or a memo of its results. A
# model counts, as does what a function returns that has no arguments, such as a table that it reads from a
# file. All else is a memo: it follows from the function's code and its arguments, and may grow at each call.

MEMO = type(functools.lru_cache(print))
_CONSTANTS = (type, enum.Enum, torch.device, torch.dtype, pathlib.PurePath)
_MOST = 128  # results of a function: more are a memo


class Result(NamedTuple):
    """A result that a function keeps, and whether it counts; `call` is the text of its arguments."""

    value: Any
    call: str
    counts: bool


def kept_by(memo: Any) -> dict[Any, Any] | None:
    """The dict in which a function behind `lru_cache` keeps results; None if it cannot be found."""
    return next((one for one in get_referents(memo) if type(one) is dict and one is not vars(memo)), None)


def results_of(memo: Any, kept: dict[Any, Any], label_of: Callable[[Any], str | None]) -> list[Result]:
    """The results for arguments that are values, or objects with a label: others are not of this walk."""
    if len(kept) > _MOST:
        return [Result(None, "", False)]
    found = list(kept.items())
    if found and type(found[0][1]).__name__ == "_lru_list_elem":  # it has no referents, but the memo has
        keys, each = set(map(id, kept)), iter(get_referents(memo))
        found = [(key, next(each, None)) for key in each if id(key) in keys]
    results = []
    for key, value in found:
        # `functools` puts a bare object before the arguments by name.
        arguments = [one for one in (key if type(key) is tuple else (key,)) if type(one) is not object]
        texts = list(map(_text, arguments))
        labels = [text or label_of(one) for text, one in zip(texts, arguments, strict=True)]
        if None not in labels:
            is_constant = not any(texts) and not is_plain(value) and not isinstance(value, _CONSTANTS)
            results.append(Result(value, ", ".join(map(str, labels)), is_constant or _holds_module(value)))
    return sorted(results, key=lambda one: one.call)


def referents(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What some objects hold, to be compared by identity; sorted, as calls change the order in a memo."""
    return tuple(sorted(get_referents(*values), key=id))


def _text(argument: Any) -> str:
    """A text for an argument that counts by its value; empty for others."""
    if is_plain(argument):
        return repr(argument)
    try:
        return digest([Encoder().encode(argument, "")]).hex()
    except Exception:  # not only `UnencodableError`: fields of a dataclass may raise anything
        return ""


def _holds_module(value: Any, depth: int = 3) -> bool:
    if issubclass(type(value), nn.Module) or depth == 0:
        return depth > 0
    return any(_holds_module(one, depth - 1) for one in get_referents(value) if not isinstance(one, type))


# What of a module keeps it from being cached, as far as one can see without running it: weights that are
# sharded over processes, so that forwards wait for each other; and layers that draw random numbers or mix
# items.

_ZERO_MARK = "ds_id"  # DeepSpeed's ZeRO-3 sets it on each sharded parameter


class ShardedError(Exception):
    """Raised for a module that needs other processes to compute."""

    def __init__(self, part: nn.Module, text: str) -> None:
        super().__init__(text)
        self.part = weakref.ref(part)


def sharding(module: nn.Module) -> str | None:
    """How a module's own parameters (not its submodules') are sharded; None if they are not.

    Recognises libraries by names and marks, as importing them takes seconds.
    """
    name = type(module).__name__
    bases = type(module).__mro__
    if FSDP_MARK in vars(module) or any(base.__module__.startswith(FSDP_MODULES) for base in bases):
        return f"{name} is sharded by FSDP"
    for tensor in chain(parameters_of(module).values(), buffers_of(module).values()):
        if type(tensor).__name__ == "DTensor":
            return f"{name} has a DTensor parameter"
        if hasattr(tensor, _ZERO_MARK):
            return f"{name} is sharded by ZeRO"
    return None


class _Met(set[int]):
    """What was met, by identity."""

    def __contains__(self, module: object) -> bool:
        return super().__contains__(id(module))

    def add(self, module: object) -> None:
        super().add(id(module))


def modules_of(root: Any) -> Iterator[nn.Module]:
    """A module and its submodules, each once; none for other values. Modules need not be hashable."""
    if isinstance(root, nn.Module):
        met: Any = _Met()
        yield from (module for _, module in nn.Module.named_modules(root, met))


def weights_of(root: Any) -> Iterator[Tensor]:
    """The parameters and buffers of a module; none for other values."""
    for module in modules_of(root):
        yield from chain(module.parameters(recurse=False), module.buffers(recurse=False))


class UnsteadyLayer(NamedTuple):
    """The class of a layer, and why its output for an item depends on the batch or the call."""

    name: str
    does: Literal["drops out", "normalises", "scales"]


def unsteady(module: nn.Module) -> UnsteadyLayer | None:
    """Why a module's own output (without submodules) is unsteady now; None if it is not."""
    name = type(module).__name__
    if type(module).__module__.startswith("torch.") and ".quantized.dynamic" in type(module).__module__:
        return UnsteadyLayer(name, "scales")
    if isinstance(module, BATCH_NORMS):
        if module.training or module.running_mean is None:
            return UnsteadyLayer(name, "normalises")
    elif attribute(module, "training"):  # some wrappers have no such flag
        rate = 0.0
        if isinstance(module, DROPOUTS):
            rate = module.p
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            rate = module.dropout
        if rate > 0:
            return UnsteadyLayer(name, "drops out")
    return None
