"""`OwnerWalk`: leaves some attributes of well-known packages out of a namespace.

No forward of these packages reads them, and they differ between runs that compute the same. They count all
the same if other code names them: the user's own, or that of a package that may read them.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import re
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchcache2.identity import sourcecode
from torchcache2.identity.codenames import place_of
from torchcache2.identity.codewalk import CodeWalk
from torchcache2.identity.marks import original
from torchcache2.identity.sourcecode import CompiledTexts, code_objects

__all__ = ["OwnerWalk", "left_out", "without_captures"]

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

    def is_in_code(self, code: types.CodeType) -> bool:
        """Whether code, or a text in it, has one of the names."""
        return any(
            self._is_in(text)
            for part in code_objects(code)
            for text in (*part.co_names, *part.co_consts)
            if isinstance(text, str)
        )

    def is_in_file(self, path: str) -> bool:
        """Whether a source file has one of the names; True if it cannot be read."""
        if path.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
            return False
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return self._is_in(file.read())
        except OSError:
            return True

    def _is_in(self, text: str) -> bool:
        words = {name.rpartition(".")[2].lstrip("_") for name in self.attributes if not self.is_called}
        return any(word in text and re.search(rf"\b_*{word}\b", text) for word in words)


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


class OwnerWalk(CodeWalk):
    """The part of a walk that knows whose code it reads, and what it leaves out."""

    def __init__(self, texts: CompiledTexts) -> None:
        super().__init__(texts)
        self.skipped: list[tuple[LeftOut, str, Any]] = []  # what was left out, where, and its value
        self.is_foreign = False  # whether what is being read is not the user's own code
        self._code: dict[int, types.CodeType] = {}
        self._counted: set[int] = set()  # what was left out at first, and is named

    def klass(self, kind: type, path: str) -> bytes:
        """Write down a class, and note whose code that is."""
        before, self.is_foreign = self.is_foreign, self.is_foreign and self.origins.of(kind) != "project"
        try:
            return super().klass(kind, path)
        finally:
            self.is_foreign = before

    def function(self, function: types.FunctionType, path: str) -> bytes:
        """Write down a function, and note whose code that is."""
        code = original(function).__code__
        before, self.is_foreign = self.is_foreign, self.origins.of(original(function)) != "project"
        if not self.is_foreign:
            self._code[id(code)] = code
        try:
            return super().function(function, path)
        finally:
            self.is_foreign = before

    def without_skipped(self, kind: type, state: Mapping[str, Any], path: str) -> dict[str, Any]:
        """The attributes of an object without those that are left out."""
        kept = dict(state)
        for name, rule in left_out(kind).items():
            attribute, _, key = name.partition(".")
            if attribute not in kept:
                continue
            value = kept[attribute]
            if not key:
                del kept[attribute]
            elif isinstance(value, dict) and key in value:
                value = value[key]
                kept[attribute] = {other: item for other, item in kept[attribute].items() if other != key}
            else:
                continue
            self.skipped.append((rule, f"{path}.{name}", value))
        return kept

    def count_what_is_named(self) -> bool:
        """Write down what was left out if code that was met names it; returns whether there is more of it."""
        named = {rule for rule in {one[0] for one in self.skipped} if self._is_named(rule)}
        due = [n for n, one in enumerate(self.skipped) if one[0] in named and n not in self._counted]
        for number in due:  # to write this down may meet more code, and leave out more
            _, path, value = self.skipped[number]
            self.parts[f"named {path} {number}"] = self.encode(value, path)
        self._counted.update(due)
        return bool(due)

    def _is_named(self, rule: LeftOut) -> bool:
        """Whether code names what is left out: a project's, or that of another package."""
        files = [*self.project_files]
        for module in self._versions:
            if module.partition(".")[0] not in (rule.package, *_RELATED):
                files.append(place_of(module) or "")
        return any(map(rule.is_in_code, self._code.values())) or any(map(rule.is_in_file, files))
