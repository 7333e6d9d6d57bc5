"""Models of diffusers, tiny."""

import torch
from torch import nn

from tests.torch.zoo.checks import Entry
from tests.torch.zoo.models_transformers import clip_text, sentences, set_on, swap

BLOCKS = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}


def images(count):
    return {"sample": torch.randn(count, 3, 16, 16)}


def noise(count):
    """What a denoising model gets: latents, their time, and a text."""
    return {
        "sample": torch.randn(count, 4, 8, 8),
        "timestep": torch.randint(1000, (count,)),
        "encoder_hidden_states": torch.randn(count, 5, 8),
    }


def packed_noise(count):
    """The latents of Flux, in a row; where each of them is holds for the whole batch."""
    return {
        "hidden_states": torch.randn(count, 16, 4),
        "encoder_hidden_states": torch.randn(count, 5, 8),
        "pooled_projections": torch.randn(count, 8),
        "timestep": torch.rand(count),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(5, 3),
    }


def autoencoder():
    import diffusers

    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    return diffusers.AutoencoderKL(latent_channels=4, **kinds, **BLOCKS)


def unet():
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
        **BLOCKS,
    )


def pixart():
    import diffusers

    return diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=8,
        use_additional_conditions=False,
    )


def pixart_noise(count):
    arguments = noise(count)
    added = {"resolution": None, "aspect_ratio": None}
    return {"hidden_states": arguments.pop("sample"), **arguments, "added_cond_kwargs": added}


def flux():
    import diffusers

    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )


ENTRIES = {
    "autoencoder": Entry(autoencoder, images, {"norm": swap("decoder.conv_norm_out", nn.Identity)}),
    "unet": Entry(unet, noise, {"time": set_on("time_proj", "flip_sin_to_cos", False)}),
    "pixart": Entry(pixart, pixart_noise, {"eps": set_on("norm_out", "eps", 0.5)}),
    "flux": Entry(
        flux, packed_noise, {"rotation": set_on("pos_embed", "theta", 3)}, shared=("img_ids", "txt_ids")
    ),
    "text encoder": Entry(clip_text, sentences, {"skip": set_on("text_model", "eos_token_id", 4)}),
}
