"""Ledger of the SGLang functions that we wrap or replace, and the strict installer for it.

SGLang logs and forgets a hook that cannot be applied. ``install`` applies through SGLang's own HookRegistry and then
looks at the target: a hook that is not there raises HookError.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from atom_plugin import host


class HookError(RuntimeError):
    """A hook of ours is missing from the function that it was meant for."""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One row of the ledger.

    ``hook`` follows SGLang's HookRegistry: around ``(original, *args, **kwargs)``, after ``(result, *args, **kwargs)``,
    replace ``(*args, **kwargs)``. ``versions``: the SGLang range that needs the row, "" for all; it is skipped
    outside.
    """

    target: str
    kind: Literal["around", "after", "replace"]
    hook: Callable[..., Any]
    why: str
    upstream: str
    remove_when: str
    versions: str = ""

    def applies(self) -> bool:
        """Return whether the SGLang that is here needs this row."""
        if not host.says_version():
            return not self.versions
        return SpecifierSet(self.versions).contains(host.sglang_version(), prereleases=True)


_installed: list[Hook] = []


def installed() -> tuple[Hook, ...]:
    """Return the rows installed in this process, in order."""
    return tuple(_installed)


def install(hooks: Sequence[Hook]) -> None:
    """Apply every row that this SGLang needs, and raise HookError with all that did not take.

    A row that is installed already is left alone, so that several entry points may ask for the same one.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource(plugin_name="atom", dist_name="atom-plugin")
    rows = [row for row in hooks if row.applies() and row not in _installed]
    HookRegistry.apply_hooks()  # what other plugins have asked for so far
    for row in rows:
        _reopen(row.target)
        HookRegistry.register(row.target, row.hook, HookType(row.kind), source=source)
    HookRegistry.apply_hooks()
    lost = [row.target for row in rows if not is_applied(row)]
    if lost:
        raise HookError(
            f"SGLang {host.sglang_version()} did not take our hooks on: {', '.join(lost)}. "
            f"atom-plugin supports SGLang {host.SUPPORTED_SGLANG}; see `atom-plugin doctor`."
        )
    for row in rows:
        _reopen(row.target)
    _installed.extend(rows)


def _reopen(target: str) -> None:
    """Let the next hook on ``target`` go around what is there: SGLang patches each target once and skips the rest."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry._patched.discard(target)
    HookRegistry._hooks.pop(target, None)


def is_applied(row: Hook) -> bool:
    """Return whether the function that ``row`` names now runs our hook."""
    try:
        current = pkgutil.resolve_name(row.target)
    except (ImportError, AttributeError):
        return False
    return any(layer is row.hook or row.hook in _closure_values(layer) for layer in _layers(current))


def _layers(function: object) -> Iterator[object]:
    seen: object | None = function
    while seen is not None:
        yield seen
        seen = vars(seen).get("__wrapped__") if isinstance(seen, Callable) and hasattr(seen, "__dict__") else None  # type: ignore[arg-type]


def _closure_values(function: object) -> list[object]:
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]
