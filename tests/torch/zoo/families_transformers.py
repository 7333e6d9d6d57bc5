"""Families of transformers: the base model of each configuration that can be made tiny."""

import contextlib
import functools
import inspect
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from tests.torch.zoo.checks import Entry
from tests.torch.zoo.families import Family, SkippedError, check_size

_SIDE, _WORDS, _LENGTH = 32, 60, 7
_WIDTH = "hidden_size d_model n_embd embed_dim embedding_size projection_dim dim encoder_hidden_size"
_LAYERS = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"
_HEADS = "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"
_INNER = "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim moe_intermediate_size"
_TINY = {
    **dict.fromkeys(_WIDTH.split(), 32),
    **dict.fromkeys(_LAYERS.split(), 2),
    **dict.fromkeys(_HEADS.split(), 4),
    **dict.fromkeys(_INNER.split(), 48),
    "vocab_size": _WORDS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "image_size": _SIDE,
    "patch_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "state_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}


def families() -> list[Family]:
    """Each kind of configuration that has a base model."""
    kinds = sorted(CONFIG_MAPPING.keys())
    return [Family("transformers", kind, functools.partial(_entry, kind)) for kind in kinds]


def _entry(kind: str) -> Entry:
    try:
        config = _tiny(CONFIG_MAPPING[kind])
        model_class = MODEL_MAPPING[type(config)]
    except TimeoutError:
        raise
    except KeyError as error:
        raise SkippedError("a part without a base model of its own") from error
    except Exception as error:
        raise SkippedError(f"no tiny configuration: {type(error).__name__}") from error
    if isinstance(model_class, (list, tuple)):
        model_class = model_class[0]
    build = functools.partial(_build, model_class, config)
    try:
        check_size(build)
        model = build().eval()
    except (SkippedError, TimeoutError):
        raise
    except Exception as error:
        raise SkippedError(f"a tiny one does not build: {type(error).__name__}") from error
    for inputs in _guesses(model):
        try:
            model(**inputs(2))
        except TimeoutError:
            raise
        except Exception:
            continue
        return Entry(build, inputs)
    raise SkippedError("takes inputs that are not guessed")


def _build(model_class: type, config: Any) -> nn.Module:
    return model_class(config)


def _tiny(kind: type) -> Any:
    """A configuration with small sizes, and its parts likewise."""
    whole = kind()
    known = set(inspect.signature(kind.__init__).parameters) | set(vars(whole))
    options = {name: value for name, value in _TINY.items() if name in known}
    for name in ("image_size", "patch_size"):
        if isinstance(getattr(whole, name, None), (list, tuple)):
            options[name] = [options[name]] * len(getattr(whole, name))
    for name, part in kind.sub_configs.items():
        inner = getattr(whole, name, None)
        if isinstance(inner, transformers.PretrainedConfig) and part is not transformers.AutoConfig:
            options[name] = _tiny(type(inner)).to_dict()
    try:
        return kind(**options)
    except Exception:  # some sizes do not go together: those that do, one by one
        accepted: dict[str, Any] = {}
        for name, value in options.items():
            with contextlib.suppress(Exception):
                kind(**accepted, **{name: value})
                accepted[name] = value
        return kind(**accepted)


def _guesses(model: nn.Module) -> list[Any]:
    """Ways to call a model, the likeliest first."""
    takes = inspect.signature(model.forward).parameters
    main = {
        "pixel_values": _images,
        "input_ids": _texts,
        "input_features": _spectra,
        "input_values": _sounds,
    }
    names = model.main_input_name  # or several
    usual = [*([names] if isinstance(names, str) else names), *main]
    usual = [name for name in usual if name in takes and name in main]
    found = []
    for name in dict.fromkeys(usual):
        found.append(functools.partial(_some, model, {name: main[name]}))
        if "decoder_input_ids" in takes:
            both = {name: main[name], "decoder_input_ids": _texts}
            found.insert(0, functools.partial(_some, model, both))
    if {"pixel_values", "input_ids"} <= set(takes):
        found.append(functools.partial(_some, model, {"pixel_values": _images, "input_ids": _texts}))
    return found


def _some(model: nn.Module, makers: dict[str, Any], count: int) -> dict[str, torch.Tensor]:
    return {name: make(model, count) for name, make in makers.items()}


def _images(model: nn.Module, count: int) -> torch.Tensor:
    config = getattr(model.config, "vision_config", model.config)
    side = getattr(config, "image_size", _SIDE)
    side = side if isinstance(side, int) else side[0]
    return torch.randn(count, getattr(config, "num_channels", 3), side, side)


def _texts(model: nn.Module, count: int) -> torch.Tensor:
    return torch.randint(3, _WORDS, (count, _LENGTH))


def _spectra(model: nn.Module, count: int) -> torch.Tensor:
    config = model.config
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    return torch.randn(count, bins, 2 * getattr(config, "max_source_positions", 50))


def _sounds(model: nn.Module, count: int) -> torch.Tensor:
    return torch.randn(count, 4000)
