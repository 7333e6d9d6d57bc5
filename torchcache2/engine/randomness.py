"""`RandomState`: random generators: whether they have advanced, and how to restore them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class RandomState:
    """Remembers the state of the default generators of torch, NumPy and Python, and of some others."""

    def __init__(self, generators: Iterable[Any]) -> None:
        self._generators = list(generators)
        self._state = self._read()

    def moved(self) -> bool:
        """Whether a number has been drawn since this was made."""
        (tensors, *others), (before, *others_before) = self._read()[0], self._state[0]
        # A device initialised since then has a new generator. Its state is a seed of 8 bytes and an offset,
        # which is 0 until a number is drawn.
        new = tensors[len(before) :]
        return bool(
            tensors[: len(before)] != before or others != others_before or any(any(s[8:]) for s in new)
        )

    def restore(self) -> None:
        """Restore the generators' state."""
        _, cpu, cuda, numbers, numpy_state, others = self._state
        torch.set_rng_state(cpu)
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)
        random.setstate(numbers)
        np.random.set_state(numpy_state)
        for generator, state in zip(self._generators, others, strict=True):
            _set_state(generator, state)

    def _read(self) -> tuple[Any, ...]:
        cpu = torch.get_rng_state()
        cuda: list[Tensor] = []
        # Not `is_available`, which makes CUDA unusable in forked children.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            cuda = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
        numbers = random.getstate()
        numpy_state: Any = np.random.get_state()
        others = list(map(state_of, self._generators))
        comparable = (
            [state.numpy().tobytes() for state in (cpu, *cuda)],
            numbers,
            [part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy_state],
            list(map(_comparable, others)),
        )
        return comparable, cpu, cuda, numbers, numpy_state, others


def state_of(generator: Any) -> Any:
    """The state of a generator of torch, NumPy or Python; includes its seed."""
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def _comparable(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.cpu().numpy().tobytes()
    return repr(state)
