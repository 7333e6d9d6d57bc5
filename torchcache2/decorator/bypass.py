"""May this call be cached? Every reason why not, where it is found, and the advice for it.

The checks that need no forward are here, in this order: of the module, of the arguments, of the weights.
`torchcache2.decorator.forward` checks what the forward did, and `torchcache2.decorator.probes` what is known
about the items of the module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from torchcache2.core.errors import (
    InputError,
    NotCachedError,
    OptionError,
    OutputError,
    UnhashableArgumentError,
)
from torchcache2.core.private import keeps_parametrized
from torchcache2.core.rows import UnstorableError
from torchcache2.engine.batch import NotStoredError, RefusedError
from torchcache2.engine.randomness import RandomContexts
from torchcache2.identity.arguments import BoundCall, Signature, UncachedArgumentError
from torchcache2.identity.namespace import NamespaceKeeper, Seen

__all__ = [
    "REASONS",
    "BypassError",
    "Reason",
    "ask_arguments",
    "ask_module",
    "ask_randomness",
    "ask_weights",
    "not_stored",
]


class Reason(NamedTuple):
    """A reason why calls are not cached.

    `asked` says what is checked for it. The module and the weights are checked at every call, at little cost.
    To check the arguments or the forward costs as much as caching does. `advice` says what to do; it is empty
    where the text of each case says it.
    """

    asked: Literal["module", "weights", "arguments", "forward"]
    advice: str = ""


REASONS = {
    "grad": Reason(
        "module", "call it under torch.no_grad() or set requires_grad_(False) on parameters and inputs"
    ),
    "training": Reason("module", "call .eval() first; a trainer's model.train() may have undone it"),
    "argument": Reason("arguments"),
    "batch": Reason(
        "forward",
        "an item's output has to depend on that item alone. If the batch is not the first dimension, "
        "use batch_first=True; name arguments of the whole batch in shared_args; decorate a narrower "
        "function; quantize statically. If only rounding differs, probe=False keeps the rows",
    ),
    "random": Reason(
        "forward",
        "its output is random: nothing to do if that is meant, else remove the random operation; or "
        "another thread drew random numbers meanwhile",
    ),
    "state": Reason(
        "forward",
        "the forward changed a tensor, an attribute or a container of its own module, or a global one; "
        "if that happens at every call, it cannot be cached",
    ),
    "inference": Reason("module", "make or load the module under torch.no_grad() instead"),
    "autocast": Reason("weights", "change weights outside of the autocast context"),
    "input": Reason("forward", "the forward changed its input in place; have it work on a copy"),
    "parametrize": Reason("module", "call it outside of that context"),
    "subclass": Reason("arguments", "pass dense tensors of torch's own type to have the call cached"),
    "lazy": Reason("module", "the next call can be cached"),
    "sharded": Reason(
        "module",
        "a rank that finds all items would skip a forward in which others wait. Cache a module that is whole "
        "on each rank, such as a frozen one outside of the model that is sharded; or have ranks call it in "
        "step, by distributed='collective' with a persistent_module_hash",
    ),
    "output": Reason("forward"),
}
_LAYERS = {  # reason and text by what an `UnsteadyLayer` does
    "drops out": ("training", "{} drops out at random"),
    "normalises": ("training", "{} normalises by the statistics of the batch"),
    "scales": ("batch", "the dynamically quantized {} scales by the range of the batch"),
}


class BypassError(RefusedError):
    """Raised where a check finds that a call cannot be cached.

    `reason` is a key of `REASONS`, and `text` says why and what to do. If it `is_final`, calls of this kind
    are not expected to be cached later.
    """

    def __init__(
        self, reason: str, text: str, error: Exception | None = None, *, is_final: bool = True
    ) -> None:
        super().__init__(reason, text, error)
        self.is_final = is_final and REASONS[reason].asked in ("arguments", "forward")

    @classmethod
    def because(cls, reason: str, why: str, *, is_final: bool = True) -> BypassError:
        """The error for a reason, with `why` and the advice for the reason as its text."""
        return cls(reason, f"{why}; {REASONS[reason].advice}", is_final=is_final)

    @classmethod
    def of(cls, stop: NotStoredError, *, is_final: bool = True) -> BypassError:
        """The error for an output that must not be stored."""
        return cls(stop.reason, stop.text, stop.error, is_final=is_final)

    def as_error(self, name: str) -> NotCachedError:
        """What ``strict=True`` raises for a module of this name."""
        if isinstance(self.error, NotCachedError):
            return self.error
        kind = OutputError if isinstance(self.error, UnstorableError) else NotCachedError
        return kind(f"{name}: not cached ({self.reason}): {self.text}")


def not_stored(reason: str, output: Any, why: str = "") -> NotStoredError:
    """The error for an output that must not be stored, with the advice for the reason."""
    advice = REASONS[reason].advice
    return NotStoredError(reason, f"{why}; {advice}" if why else advice, output)


def ask_module(keeper: NamespaceKeeper, root: Any) -> None:
    """Raise if no call of the module can be cached now, whatever its arguments are."""
    facts = keeper.facts(root)
    if facts.sharded is not None:
        raise BypassError.because("sharded", facts.sharded)
    if facts.is_parametrized and keeps_parametrized():
        raise BypassError.because("parametrize", "parametrize.cached() keeps weights that may have changed")
    if torch.is_grad_enabled() and keeper.requires_grad():
        keeper.distrust_tensors()
        raise BypassError.because("grad", "grad mode is on and a parameter requires grad")
    if facts.has_lazy:
        raise BypassError.because("lazy", "a parameter is uninitialised")
    if facts.is_uncounted:
        raise BypassError.because(
            "inference",
            "weights made under torch.inference_mode have no version counters, and more than 500 kB of them "
            "are too many to be read at every call",
        )
    if facts.unsteady is not None:
        reason, text = _LAYERS[facts.unsteady.does]
        raise BypassError.because(reason, text.format(facts.unsteady.name))


def ask_arguments(
    signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], keeper: NamespaceKeeper
) -> BoundCall | None:
    """The call, bound to a signature; raises if its arguments cannot be put in keys.

    None if the arguments do not fit the signature: the plain forward then raises the usual error.
    """
    try:
        call = signature.bind(args, kwargs)
    except UncachedArgumentError as error:
        raise BypassError.because("subclass", str(error)) from None
    except (InputError, UnhashableArgumentError) as error:
        raise BypassError("argument", str(error), error) from None
    except OptionError:
        raise
    except TypeError:
        return None
    except Exception as error:  # such as an image that cannot be read
        raise BypassError("argument", f"the arguments cannot be read: {error!r}", error) from None
    if torch.is_grad_enabled() and call.requires_grad:
        keeper.distrust_tensors()
        raise BypassError.because("grad", "an input requires grad")
    return call


def ask_weights(seen: Seen) -> None:
    """Raise if the forward may compute with older weights than those that were read."""
    if seen.has_old_casts:
        text = "weights have changed while autocast is on, which keeps its copies of the old ones"
        raise BypassError.because("autocast", text)


def ask_randomness(random: RandomContexts, context: bytes) -> None:
    """Raise if calls of this context drew random numbers before, and are not to be tried again yet."""
    if random.bypasses(context):
        final = random.is_final(context)
        raise BypassError.because("random", "its output was random before", is_final=final)
