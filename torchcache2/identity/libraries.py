"""Code of libraries: torch's operators and graphs, and what is left out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from torchcache2.core.errors import attribute
from torchcache2.core.private import (
    CUSTOM_OPERATORS,
    OPERATOR_CODE,
    OPERATOR_DEFINITION,
)
from torchcache2.identity.sourcecode import defining_module, origin

_OVERLOAD = type(torch.ops.aten.add.Tensor)
OPERATORS = (_OVERLOAD, type(torch.ops.aten.add), OPERATOR_DEFINITION)
OPERATOR_NAMESPACES = (type(torch.ops), type(torch.ops.aten), type(torch.ops.higher_order))


def is_operator(value: Any) -> bool:
    """Whether a value is an operator, or the definition of one."""
    return isinstance(value, OPERATORS)


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
