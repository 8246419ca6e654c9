"""quantization_config -> the one checkpoint quantisation that we serve, or an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atom_plugin.configs.fields import Fields


@dataclass(frozen=True, kw_only=True)
class BlockFp8:
    """FP8 e4m3 weights with one fp32 ``weight_scale_inv`` per block, activations quantised at run time.

    ``block`` is (rows, columns) of a weight ``[out_features, in_features]``; ``unquantized``: module names left alone.
    """

    block: tuple[int, int]
    unquantized: frozenset[str]

    def covers(self, module: str) -> bool:
        """Return whether the linear layer that the checkpoint calls ``module`` is stored in FP8."""
        return module not in self.unquantized and module.rsplit(".", 1)[-1] not in {"lm_head", "gate", "embed_tokens"}


def read_quantization(fields: Fields) -> BlockFp8 | None:
    """Return the quantisation of ``fields``, None for none; raise ConfigError for any other than block FP8."""
    raw = fields.optional("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise fields.error("quantization_config", "a mapping is required")
    method = raw.get("quant_method")
    block = raw.get("weight_block_size")
    if method != "fp8" or not (isinstance(block, (list, tuple)) and list(block) == [128, 128]):
        raise fields.error(
            "quantization_config",
            "accepted: none, or quant_method 'fp8' with weight_block_size [128, 128]; "
            "drop `--model-impl atom` to serve this checkpoint with SGLang's own model",
        )
    for name, accepted in (("activation_scheme", (None, "dynamic")), ("fmt", (None, "e4m3"))):
        if raw.get(name) not in accepted:
            raise fields.error("quantization_config", f"{name} {raw[name]!r}: accepted is {accepted[1]!r}")
    listed = {key: raw[key] for key in ("modules_to_not_convert", "ignored_layers") if raw.get(key)}
    if len(listed) > 1 and len({tuple(sorted(names)) for names in listed.values()}) > 1:
        raise fields.error("quantization_config", "modules_to_not_convert and ignored_layers contradict each other")
    names = next(iter(listed.values()), ())
    return BlockFp8(block=(128, 128), unquantized=frozenset(names))
