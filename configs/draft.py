"""What a launch reads of the config of a draft model, which is not ours: its architecture."""

from __future__ import annotations

from atom_plugin.configs.airlock import raw_config
from atom_plugin.configs.fields import ConfigError


def draft_architecture(model_path: str, revision: str | None) -> str:
    """Return the architecture that the config.json of a draft names; raise ConfigError where it names not one."""
    source, values = raw_config(model_path, revision)
    named = values.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ConfigError(f"{source}: 'architectures' is {named!r}: the name of one draft model is required")
    return named[0]
