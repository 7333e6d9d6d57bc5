"""Attributes of well-known packages that are left out of a namespace.

No forward of these packages reads them, and they differ between runs that compute the same. They count all
the same if other code names them: the user's own, or that of a package that may read them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torchcache2.identity import sourcecode

__all__ = ["LeftOut", "left_out", "without_captures"]

# These packages use such names only to save models and to write about them, not to compute.
_RELATED = ("accelerate", "diffusers", "peft", "sentence_transformers", "transformers")


class LeftOut(NamedTuple):
    """Attributes of a class, or keys if it is a mapping, that are left out.

    In ``attribute.key``, the attribute is a dict, and only this key is left out.
    """

    package: str
    class_name: str
    attributes: tuple[str, ...]
    reason: str
    is_called: bool = False  # the package calls it, but uses nothing that it returns

    def is_named(self, words: Mapping[str, Collection[str]]) -> bool:
        """Whether code names it: the user's, or another package's. `words` are those in code, by package."""
        last = [name.rpartition(".")[2].lstrip("_") for name in self.attributes if not self.is_called]
        names = {f"{begin}{name}" for name in last for begin in ("", "_", "__")}
        others = [those for package, those in words.items() if package not in (self.package, *_RELATED)]
        return not all(map(names.isdisjoint, others))


_PLACE = "where something was loaded from; weights and vocabularies count by content, classes by code"
_TOKENIZER = ("name_or_path", "vocab_file", "tokenizer_file")
_TABLE = (
    LeftOut(
        "transformers",
        "GenerationConfig",
        ("_original_object_hash",),
        "Python's hash of a text, another in each process; tells save_pretrained of changes",
    ),
    LeftOut("transformers", "PreTrainedConfig", ("_name_or_path",), _PLACE),
    LeftOut("transformers", "PretrainedConfig", ("_name_or_path",), _PLACE),  # before version 5
    LeftOut("transformers", "PreTrainedModel", ("name_or_path",), _PLACE),
    LeftOut(
        "transformers",
        "PreTrainedModel",
        ("_output_capturing_hooks_installed",),
        "whether hidden states were asked for before: see `without_captures`",
    ),
    LeftOut(
        "transformers",
        "PreTrainedTokenizerBase",
        (*_TOKENIZER, *[f"init_kwargs.{name}" for name in _TOKENIZER]),
        _PLACE,
    ),
    LeftOut(
        "diffusers",
        "FrozenDict",
        ("_use_default_values",),
        "a list in the order of a set, another in each process; read when a config is loaded",
    ),
    LeftOut("diffusers", "FrozenDict", ("_name_or_path",), _PLACE),
    LeftOut("peft", "PeftConfigMixin", ("base_model_name_or_path",), _PLACE),
    LeftOut(
        "sentence_transformers",
        "Transformer",
        ("_prompt_length_mapping",),
        "a memo of what its tokenizer makes of prompts",
    ),
    LeftOut(
        "torch",
        "RemovableHandle",
        ("id", "hooks_dict_ref", "extra_dict_ref"),
        "a count of the hooks of the process, to remove one; hooks count where they run",
    ),
    *[  # one by one, as other people's classes have a `graph` too
        LeftOut("torch", "GraphModule", (name,), "notes of tools about a graph, whose code counts")
        for name in (
            *("_code", "_graph", "_lineno_map", "_prologue_start", "_tracer_cls", "_tracer_extras"),
            *("_create_node_hooks", "_erase_node_hooks", "_replace_hooks", "_deepcopy_hooks"),
            *("meta", "range_constraints", "shape_env"),
        )
    ],
    LeftOut(
        "torch",
        "GuardsFn",
        ("forward",),
        "raises where arguments are not as they were exported, and returns nothing",
        is_called=True,
    ),
)
_CLASSES = frozenset(rule.class_name for rule in _TABLE)


def left_out(kind: type) -> dict[str, LeftOut]:
    """What is left out of instances of a class, by name of the attribute or key."""
    found = {}
    for base in kind.__mro__:
        if base.__qualname__ in _CLASSES and sourcecode.origin(base) in ("installed", "torch"):
            package = sourcecode.defining_module(base).partition(".")[0]
            for rule in _TABLE:
                if (rule.package, rule.class_name) == (package, base.__qualname__):
                    found.update(dict.fromkeys(rule.attributes, rule))
    return found


def without_captures(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """The hooks of a module without those by which transformers collects hidden states.

    It sets them in the first call that asks for these, and they do nothing in others. Set twice, as they may
    be for a model and one around it, they collect twice, and count.
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
