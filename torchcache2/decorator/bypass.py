"""`BypassError`: why a call is not cached, on its way to whoever counts it."""

from __future__ import annotations

from torchcache2.core.errors import NotCachedError, OutputError
from torchcache2.core.rows import UnstorableError
from torchcache2.engine.batch import NotStoredError

__all__ = ["ADVICE", "BypassError"]

# What to do about each reason.
ADVICE = {
    "grad": "call it under torch.no_grad() or set requires_grad_(False) on parameters and inputs",
    "training": "call .eval() first; a trainer's model.train() may have undone it",
    "batch": "an item's output has to depend on that item alone. If the batch is not the first dimension, "
    "use batch_first=True; name arguments of the whole batch in shared_args; decorate a narrower function; "
    "quantize statically. If only rounding differs, probe=False keeps the rows",
    "parametrize": "call it outside of that context",
    "lazy": "the next call can be cached",
    "inference": "make or load the module under torch.no_grad() instead",
    "random": "its output is random: nothing to do if that is meant, else remove the random operation; or "
    "another thread drew random numbers meanwhile",
    "state": "the forward changed a tensor, an attribute or a container of its own module, or a global one; "
    "if that happens at every call, it cannot be cached",
    "subclass": "pass dense tensors of torch's own type to have the call cached",
    "autocast": "change weights outside of the autocast context",
    "input": "the forward changed its input in place; have it work on a copy",
}

# What is only found by trying, which costs as much as caching does. Others are seen at once.
_FOUND_BY_TRYING = frozenset(("argument", "batch", "input", "output", "random", "state", "subclass"))


class BypassError(Exception):
    """Raised where it shows that a call cannot be cached.

    Parameters
    ----------
    reason : str
        A word for statistics.
    text : str
        A sentence that says what to do, too.
    error : Exception, optional
        What makes it impossible, if an exception does.
    is_final : bool
        Whether calls of this kind are not expected to be cached later.
    """

    def __init__(
        self, reason: str, text: str, error: Exception | None = None, *, is_final: bool = True
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.text = text
        self.error = error
        self.is_final = is_final and reason in _FOUND_BY_TRYING

    @classmethod
    def because(cls, reason: str, why: str, *, is_final: bool = True) -> BypassError:
        """With the advice that there is for the reason."""
        return cls(reason, f"{why}; {ADVICE[reason]}", is_final=is_final)

    @classmethod
    def of(cls, stop: NotStoredError, *, is_final: bool = True) -> BypassError:
        """Of an output that must not be stored."""
        return cls(stop.reason, stop.text, stop.error, is_final=is_final)

    def as_error(self, name: str) -> NotCachedError:
        """What ``strict=True`` raises for a module of this name."""
        if isinstance(self.error, NotCachedError):
            return self.error
        kind = OutputError if isinstance(self.error, UnstorableError) else NotCachedError
        return kind(f"{name}: not cached ({self.reason}): {self.text}")
