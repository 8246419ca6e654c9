"""hf_config -> one frozen spec per model family; the only code that reads Hugging Face field names."""

from atom_plugin.configs.fields import ConfigError
from atom_plugin.configs.load import FAMILIES, load_spec, served_names
from atom_plugin.configs.quantization import BlockFp8
from atom_plugin.configs.qwen3 import Qwen3MoeSpec, Qwen3Spec
from atom_plugin.configs.rope import RopeSpec

__all__ = [
    "FAMILIES",
    "BlockFp8",
    "ConfigError",
    "Qwen3MoeSpec",
    "Qwen3Spec",
    "RopeSpec",
    "load_spec",
    "served_names",
]
