"""The private names of other libraries that this package uses, each with a fallback.

Future versions of a library may lack such a name. So only this file has them, as texts, most of them looked
up once, at import. If one is missing, another name replaces it, or the feature that needs it is left out.
`tests/project/test_private.py` removes each in turn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product, starmap
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize
from torch.overrides import has_torch_function

F = TypeVar("F", bound=Callable[..., Any])


def _first(*names: str, otherwise: Any = None) -> Any:
    """The object of the first of these dotted names that exists, or `otherwise`."""
    for name in names:
        with contextlib.suppress(ImportError, AttributeError):
            return pkgutil.resolve_name(name)
    return otherwise


# The second would be the public name: no version of torch has it yet.
pytree: Any = _first("torch.utils._pytree", "torch.utils.pytree")

# Modes, tracers and transforms. A default device is a mode, too, and is part of the key.

_PLAIN = torch.ones((), device="cpu")
_function_modes: Any = _first("torch.overrides._get_current_function_mode_stack")
_count_modes: Callable[[], int] = _first("torch._C._len_torch_function_stack", otherwise=lambda: 1)
_DEVICE_MODE: Any = _first("torch.utils._device.DeviceContext", otherwise=())
_transform: Any = _first(
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.maybe_current_level",
    otherwise=lambda: None,
)
is_jit_traced: Callable[[], bool] = _first("torch.jit.is_tracing", "torch._C._is_tracing", otherwise=bool)
in_dispatch_mode: Callable[[], object] = _first(
    "torch._C._len_torch_dispatch_stack",
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
    otherwise=bool,
)
is_fx_traced: Callable[[], bool] = _first(
    "torch.fx._symbolic_trace.is_fx_symbolic_tracing",
    "torch.fx._symbolic_trace.is_fx_tracing",
    otherwise=bool,  # traced values are not tensors: such calls are bypassed anyway
)
PRODUCT_PRECISION: Callable[[str, str], str] | None = _first("torch._C._get_fp32_precision_getter")


def in_foreign_mode() -> bool:
    """Whether a `TorchFunctionMode` other than a default device's is active."""
    if _function_modes is None:
        return has_torch_function((_PLAIN,))
    return _count_modes() > 0 and not all(isinstance(mode, _DEVICE_MODE) for mode in _function_modes())


def default_device() -> str:
    """The type of the default device; the public function is wrong in old versions of torch."""
    if _function_modes is None or _DEVICE_MODE == ():
        return torch.get_default_device().type
    if _count_modes() == 0:
        return "cpu"
    contexts = [mode for mode in _function_modes() if isinstance(mode, _DEVICE_MODE)]
    return str(contexts[-1].device.type) if contexts else "cpu"


def in_transform() -> bool:
    """Whether a transform of `torch.func` runs this."""
    return _transform() is not None


def in_forward_ad() -> bool:
    """Whether forward-mode differentiation is active."""
    level = getattr(forward_ad, "_current_level", None)
    if level is not None:
        return bool(level >= 0)
    try:
        forward_ad.make_dual(_PLAIN, _PLAIN)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def keeps_parametrized() -> bool:
    """Whether `torch.nn.utils.parametrize.cached` is active, or may be."""
    return bool(getattr(parametrize, "_cache_enabled", True))


_set_strategy: Any = _first("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_FrameAction: Any = _first("torch._C._dynamo.eval_frame._FrameAction")
_FrameStrategy: Any = _first("torch._C._dynamo.eval_frame._FrameExecStrategy")


def leave_out(function: F, *, with_calls: bool) -> F:
    """Keep `torch.compile` out of a function, optionally with all that it calls; returns the function.

    `torch.compiler.disable` does this, too. But it imports the compiler, which takes seconds, and most
    programs never compile. Also, new versions of torch leave out only a wrapper and compile the function
    itself; checking those graphs' guards takes longer than a hit. So set the mark in the compiler's C
    extension, which is loaded with torch.
    """
    if _set_strategy is None or _FrameAction is None or _FrameStrategy is None:
        disabled: F = torch.compiler.disable(function, recursive=with_calls)  # type: ignore[no-untyped-call]
        return disabled
    for_calls = _FrameAction.SKIP if with_calls else _FrameAction.DEFAULT
    _set_strategy(function.__code__, _FrameStrategy(_FrameAction.SKIP, for_calls))
    vars(function)["_torchdynamo_disable"] = True  # checked by graphs that call the function
    return function


def _turn_off(compiler: Any) -> None:
    """Fallback for `set_compiler`: its callers are then left out with all their calls."""


# Sets the compiler for functions called by this thread, or None; returns the previous one.
set_compiler: Callable[[Any], Any] = _first("torch._C._dynamo.eval_frame.set_eval_frame", otherwise=_turn_off)
CAN_TURN_ON = set_compiler is not _turn_off


COMPILED_FROM = "_torchdynamo_orig_callable"  # of a compiled function: else it counts as torch's code
COMPILER_ERRORS = "torch._dynamo.exc"  # else its errors get no advice

# Modules and tensors. A module's attributes are found by their content.

_MODULE, _PART, _WEIGHT = nn.Module(), nn.Module(), nn.Parameter(_PLAIN)
_MODULE.part, _MODULE.weight = _PART, _WEIGHT
_MODULE.register_buffer("buffer", _PLAIN)
_PRE_HOOK, _HOOK = (lambda *call: None for _ in range(2))
_MODULE.register_forward_pre_hook(_PRE_HOOK)
_MODULE.register_forward_hook(_HOOK)


def _holder(content: object) -> str:
    """The module's attribute whose mapping contains something."""
    mappings = {name: value for name, value in vars(_MODULE).items() if isinstance(value, Mapping)}
    return next(name for name, value in mappings.items() if any(one is content for one in value.values()))


PARAMETERS, BUFFERS, MODULES, PRE_HOOKS, HOOKS = map(_holder, (_WEIGHT, _PLAIN, _PART, _PRE_HOOK, _HOOK))


def _all_hooks() -> Iterator[dict[int, Any]]:
    for register in (register_module_forward_pre_hook, register_module_forward_hook):
        handle = register(_HOOK)
        hooks: Any = handle.hooks_dict_ref()
        handle.remove()
        yield hooks


GLOBAL_HOOKS = tuple(_all_hooks())  # hooks for every module
parameters_of: Callable[[nn.Module], Mapping[str, Tensor | None]] = attrgetter(PARAMETERS)
buffers_of: Callable[[nn.Module], Mapping[str, Tensor | None]] = attrgetter(BUFFERS)
children_of: Callable[[nn.Module], Mapping[str, nn.Module | None]] = attrgetter(MODULES)

BATCH_NORMS: Any = _first(
    "torch.nn.modules.batchnorm._BatchNorm",
    otherwise=(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)
DROPOUTS: Any = _first(
    "torch.nn.modules.dropout._DropoutNd",
    otherwise=(
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
        *(nn.AlphaDropout, nn.FeatureAlphaDropout),
    ),
)
# A method that `nn.DataParallel` calls, and its mark on replicas: else these compute with the original.
REPLICATE, REPLICA_MARK = "_replicate_for_data_parallel", "_is_replica"
FSDP_MARK = "_is_fsdp_managed_module"  # else recognised by class
FSDP_MODULES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")


def has_version(tensor: Tensor) -> bool:
    """Whether a tensor has a version counter; those made under `torch.inference_mode` have none."""
    return not tensor.is_inference() and _has_versions


version: Callable[[Tensor], int] = attrgetter("_version")
_has_versions = hasattr(Tensor, "_version")  # else all tensors are compared like those without a counter
_TensorGuards: Any = _first("torch._C._dynamo.guards.TensorGuards")


def form_check(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """A fast check that tensors still have their current dtype, shape, strides and grad flag.

    Also fails under another mode, such as autocast. None if torch has no such function.
    """
    with contextlib.suppress(TypeError):
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return guards.check  # type: ignore[no-any-return]
    return None


# Operators.

CUSTOM_OPERATORS: Mapping[str, Any] = _first("torch._library.custom_ops.OPDEFS", otherwise={})
OPERATOR_DEFINITION: Any = _first(
    "torch.library.CustomOpDef", "torch._library.custom_ops.CustomOpDef", otherwise=()
)
OPERATOR_CODE = ("_init_fn", "_backend_fns", "_torch_dispatch_fns")  # its functions that affect outputs

# The standard library, and the file systems of buckets.

_is_set: Any = _first("os.environ._data.__contains__") if os.name == "posix" else None


def variable(name: str) -> str | None:
    """The current value of an environment variable; None if it is not set.

    Most are not: `os.environ` then raises and handles an error, which takes as long as looking up a row.
    """
    return os.environ.get(name) if _is_set is None or _is_set(name.encode()) else None


_register_atexit: Any = _first("threading._register_atexit")  # `concurrent.futures` uses it, too


def register_before_pools_end(function: Callable[[], None]) -> None:
    """Register a function to run before the pools of `concurrent.futures` end; never if unsupported."""
    if _register_atexit is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter is ending already
            _register_atexit(function)


def is_given_work() -> bool:
    """Whether `multiprocessing` is spawning this process now; else it counts as another run's."""
    return hasattr(multiprocessing.current_process(), "_inheriting")


# The global modes of torch that change results, as part of a key: autocast, the default dtype and device,
# deterministic algorithms, denormal numbers, and the precision of float32 products. Modes in their initial
# state add nothing, so that keys do not depend on which modes a version of torch has.

_UNITS = [(place, kind) for place in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]
_EPS = {"none": 0.0, "ieee": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-7} | {
    "highest": 0.0,
    "high": 2.0**-10,
    "medium": 2.0**-7,
}
# The initial mode is "none": full precision. "highest" sets "ieee", which is equivalent.
_USUAL = {unit: {"none", "ieee"} for unit in _UNITS} | {("cuda", "conv"): {"tf32"}, ("cuda", "rnn"): {"tf32"}}
_ALL_USUAL = frozenset(product(*_USUAL.values()))


def _has_autocast(kind: str) -> bool:
    with contextlib.suppress(RuntimeError):
        torch.is_autocast_enabled(kind)
        return True
    return False


# A model may be on another device than a call's arguments, such as texts.
_HERE = tuple(filter(_has_autocast, ("cpu", "cuda", "mps", "xpu")))


def modes(devices: Iterable[str]) -> str:
    """The modes in force for operations on these types of devices."""
    state = [f"default {torch.get_default_dtype()} {_precision()}"]
    for kind in _HERE if set(devices) <= {*_HERE} else sorted({*_HERE, *devices}):
        if torch.is_autocast_enabled(kind):
            state.append(f"{kind} {torch.get_autocast_dtype(kind)}")
    if not torch.backends.mha.get_fastpath_enabled():
        state.append("no fast path of attention")
    if torch.are_deterministic_algorithms_enabled():
        state.append("deterministic")
    if (device := default_device()) != "cpu":
        state.append(f"device {device}")
    if sys.float_info.min / 2 == 0.0:  # torch cannot report `torch.set_flush_denormal`
        state.append("flush denormal")
    return "; ".join(state)


def _precision() -> str:
    if PRODUCT_PRECISION is None:
        return torch.get_float32_matmul_precision()
    # The public function raises if a program has used both ways to set it.
    found = tuple(starmap(PRODUCT_PRECISION, _UNITS))
    if found in _ALL_USUAL:
        return "highest"
    units = zip(_UNITS, found, strict=True)
    return ",".join(f"{place}.{kind}={is_}" for (place, kind), is_ in units if is_ not in _USUAL[place, kind])


def product_precision() -> float:
    """The relative precision of the coarsest float32 products allowed on devices in use."""
    if PRODUCT_PRECISION is None:
        values = {_EPS[torch.get_float32_matmul_precision()]}
    else:
        places = {"cuda"} if torch.cuda.is_initialized() else {"mkldnn"}  # type: ignore[no-untyped-call]
        values = {_EPS[PRODUCT_PRECISION(*unit)] for unit in _UNITS if unit[0] in places}
    return max(values)


def autocast_keeps_weights() -> bool:
    """Whether autocast may compute with outdated copies of weights."""
    return torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, _HERE))
