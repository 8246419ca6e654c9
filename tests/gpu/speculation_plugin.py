"""An SGLang plugin for tests: launches on a GPU may speculate, which a user's may not before these tests have run."""

from __future__ import annotations


def register() -> None:
    """Let launches through."""
    from atom_plugin import speculation

    speculation.machine_problems = lambda arch: []
