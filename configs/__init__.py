"""hf_config -> one frozen spec per model family; the only code that reads Hugging Face field names."""

from atom_plugin.configs.airlock import raw_config
from atom_plugin.configs.decoder import DecoderSpec
from atom_plugin.configs.draft import draft_architecture
from atom_plugin.configs.fields import ConfigError
from atom_plugin.configs.kimi_k2 import KimiK2Spec
from atom_plugin.configs.kimi_k3 import KimiK3Spec
from atom_plugin.configs.kimi_linear import KimiLinearSpec
from atom_plugin.configs.load import (
    FAMILIES,
    SERVED,
    ServedSpec,
    load_served_spec,
    load_spec,
    served_family,
    served_names,
)
from atom_plugin.configs.quantization import BlockFp8, PackedInt4, PackedMxfp4, Quantization
from atom_plugin.configs.qwen3 import Qwen3MoeSpec, Qwen3Spec
from atom_plugin.configs.qwen3_5 import Qwen35MoeSpec, Qwen35Spec
from atom_plugin.configs.rope import RopeSpec

__all__ = [
    "FAMILIES",
    "SERVED",
    "BlockFp8",
    "ConfigError",
    "DecoderSpec",
    "KimiK2Spec",
    "KimiK3Spec",
    "KimiLinearSpec",
    "PackedInt4",
    "PackedMxfp4",
    "Quantization",
    "Qwen3MoeSpec",
    "Qwen3Spec",
    "Qwen35MoeSpec",
    "Qwen35Spec",
    "RopeSpec",
    "ServedSpec",
    "draft_architecture",
    "load_served_spec",
    "load_spec",
    "raw_config",
    "served_family",
    "served_names",
]
