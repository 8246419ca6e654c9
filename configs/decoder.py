"""What every decoder has, and the text model inside of a multimodal config."""

from __future__ import annotations

from dataclasses import dataclass

from atom_plugin.configs.fields import NOT_COMPUTED, Fields
from atom_plugin.configs.quantization import Quantization, read_quantization

DTYPES = ("bfloat16", "float16", "float32")

#: Fields that a multimodal config may hold for itself or for its text model.
EITHER_LEVEL = ("quantization_config", "tie_word_embeddings", "dtype", "torch_dtype")

#: What a multimodal config holds beside its text model, and the text model does not need.
BESIDE_TEXT = (
    "ignore_index",
    "image_placeholder",
    "image_token_id",
    "language_model_only",
    "media_placeholder_token_id",
    "projection_hidden_size",
    "projection_layer_norm_eps",
    "use_unified_vision_chunk",
    "video_placeholder",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
)


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Counts and widths (elements) of the whole model. ``dtype``: as the config states it, None where it does not."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: str | None
    quantization: Quantization | None


def read_decoder(
    fields: Fields, *, quantizations: tuple[type[Quantization], ...], max_positions: str = "max_position_embeddings"
) -> dict[str, object]:
    """Return the fields of DecoderSpec by name; raise ConfigError for the first that we cannot take.

    ``quantizations`` are those that the family can be stored in, ``max_positions`` is its name of the longest context.
    """
    fields.refuse(NOT_COMPUTED)
    return {
        "num_hidden_layers": fields.positive("num_hidden_layers"),
        "hidden_size": fields.positive("hidden_size"),
        "num_attention_heads": fields.positive("num_attention_heads"),
        "vocab_size": fields.positive("vocab_size"),
        "max_position_embeddings": fields.positive(max_positions),
        "rms_norm_eps": fields.between("rms_norm_eps", 0.0, 0.1),
        "tie_word_embeddings": fields.require("tie_word_embeddings", bool),
        "dtype": _dtype(fields),
        "quantization": read_quantization(fields, quantizations),
    }


def text_of(fields: Fields, model_types: tuple[str, ...]) -> Fields:
    """Return the text model of a multimodal config; raise ConfigError unless its model_type is one of ``model_types``.

    What the config may hold at either level is taken from where it is.
    """
    text = fields.nested("text_config").inheriting(fields, EITHER_LEVEL)
    text.only("model_type", model_types)
    fields.reads(*BESIDE_TEXT)
    fields.refuse(NOT_COMPUTED)
    fields.refuse_unknown()
    return text


def _dtype(fields: Fields) -> str | None:
    stated = {name: str(fields.optional(name)).removeprefix("torch.") for name in ("dtype", "torch_dtype")}
    stated = {name: value for name, value in stated.items() if fields.has(name)}
    for name, value in stated.items():
        if value not in DTYPES:
            raise fields.error(name, f"accepted: {', '.join(map(repr, DTYPES))}, or absent")
    if len(set(stated.values())) > 1:
        raise fields.error("dtype", f"it contradicts 'torch_dtype' = {fields.optional('torch_dtype')!r}")
    return next(iter(stated.values()), None)
