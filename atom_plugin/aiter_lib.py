"""Airlock to AITER: the functions we call, which version is here, and why one of them cannot be called.

Nothing here imports AITER but ``load``: ``import aiter`` raises RuntimeError on a machine without ROCm, and compiles on
one with it. What is installed is read from its source, and compared with the signatures that we know
(``signatures/{wheel,main}.json``, made by tests/aiter/make_signatures.py): a function whose parameters were renamed,
added or reordered since is refused by name and never called. We call by keyword only.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, cast

#: ``wheel``: amd-aiter 0.1.7.post2.dev18, the newest on PyPI; ``main``: ROCm/aiter e4048607, what we target.
Version = Literal["wheel", "main"]
VERSIONS: tuple[Version, ...] = ("wheel", "main")

_ATTENTION, _MHA, _CACHE = "aiter.ops.attention", "aiter.ops.mha", "aiter.ops.cache"
_FUSED = "aiter.ops.fused_qk_norm_rope_cache_quant"
_MLA = "aiter.mla"
#: The modules that define what we call; a function that a version lacks has none.
MODULES: dict[str, dict[Version, str]] = {
    "unified_attention": {
        "wheel": "aiter.ops.triton.unified_attention",
        "main": "aiter.ops.triton.attention.unified_attention",
    },
    "paged_attention_ragged": {"wheel": _ATTENTION, "main": _ATTENTION},
    "mha_batch_prefill_func": {"wheel": _MHA, "main": _MHA},
    "reshape_and_cache_flash": {"wheel": _CACHE, "main": _CACHE},
    "fused_qk_norm_rope_cache_pts_quant_shuffle": {"main": _FUSED},
    "fused_qk_rope_reshape_and_cache": {
        "wheel": "aiter.ops.triton.fused_kv_cache",
        "main": "aiter.ops.triton.fusions.fused_kv_cache",
    },
    "mla_decode_fwd": {"wheel": _MLA, "main": _MLA},
    "get_mla_metadata_info_v1": {"wheel": _ATTENTION, "main": _ATTENTION},
    "get_mla_metadata_v1": {"wheel": _ATTENTION, "main": _ATTENTION},
    "mla_gluon": {"main": "aiter.ops.triton.gluon.mla_gluon"},
    "decode_attention_fwd_grouped_rope": {
        "wheel": "aiter.ops.triton.mla_decode_rope",
        "main": "aiter.ops.triton.attention.mla_decode_rope",
    },
}

_assumed: ContextVar[Version | None] = ContextVar("assumed AITER version", default=None)


@contextlib.contextmanager
def assume(version: Version) -> Iterator[None]:
    """Let every question inside the block be answered for ``version``, whatever is installed: to plan for elsewhere.

    ``load`` raises in there: what is assumed cannot be called.
    """
    token = _assumed.set(version)
    try:
        yield
    finally:
        _assumed.reset(token)


def version() -> Version | None:
    """Return which AITER is assumed or, where none is, installed; None without any."""
    return _assumed.get() or _installed_version()


def is_assumed() -> bool:
    """Return whether questions are answered for another machine: what is installed beside AITER says nothing then."""
    return _assumed.get() is not None


def _package() -> Path | None:
    """Return the folder of the installed package; finding a package that is not imported does not run it."""
    try:
        spec = importlib.util.find_spec("aiter")
    except ValueError:  # a module without a spec was put into sys.modules
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _installed_version() -> Version | None:
    package = _package()
    if package is None:
        return None
    return "main" if (package / "ops" / "triton" / "attention").is_dir() else "wheel"


@functools.cache
def signatures(version: Version) -> dict[str, list[str]]:
    """Return dotted function path -> parameters, each ``name`` or ``name=default``, of a version that we know."""
    text = (Path(__file__).parent / "signatures" / f"{version}.json").read_text()
    return cast("dict[str, list[str]]", json.loads(text))


@functools.cache
def parameters_in(file: Path, function: str) -> list[str] | None:
    """Return the parameters of a top-level function of a source file, as ``signatures`` does; None where none is read.

    The last definition counts, as it does when the file is run. The file is parsed and not run.
    """
    if not file.is_file():
        return None
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError):  # a file for another Python
        return None
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == function]
    return _parameters(found[-1].args) if found else None


def _parameters(arguments: ast.arguments) -> list[str]:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults))
    pairs = [*zip(names, [*defaults, *arguments.defaults], strict=True)]
    pairs += [(arg.arg, default) for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    for prefix, extra in (("*", arguments.vararg), ("**", arguments.kwarg)):
        pairs += [] if extra is None else [(prefix + extra.arg, None)]
    return [name if default is None else f"{name}={ast.unparse(default)}" for name, default in pairs]


def why_not(function: str, passed: Sequence[str]) -> list[str]:
    """Return why ``function`` (a key of MODULES) cannot be called with the keywords ``passed``; empty if it can."""
    here = version()
    if here is None:
        return ["AITER is not installed"]
    if here not in MODULES[function]:
        return [f"AITER {here} has no {function}"]
    path = f"{MODULES[function][here]}.{function}"
    known = signatures(here)[path]
    if _assumed.get() is None:
        installed = _installed_parameters(MODULES[function][here], function)
        if installed is None:
            return [f"the installed AITER has no {path} that this Python can read"]
        if installed != known:
            return [f"the installed AITER's {path} takes ({', '.join(installed)}), known is ({', '.join(known)})"]
    names = [parameter.partition("=")[0] for parameter in known]
    reasons = [f"AITER {here}'s {function} has no parameter {name}" for name in passed if name not in names]
    needed = [name for name, parameter in zip(names, known, strict=True) if "=" not in parameter]
    reasons += [f"AITER {here}'s {function} needs {name}" for name in needed if name not in passed]
    return reasons


def _installed_parameters(module: str, function: str) -> list[str] | None:
    package = _package()
    assert package is not None
    return parameters_in(package.joinpath(*module.split(".")[1:]).with_suffix(".py"), function)


def load(function: str) -> Callable[..., Any]:
    """Import AITER and return ``function``, after ``why_not`` was asked; raises ImportError where it is not here."""
    if _assumed.get() is not None:
        raise ImportError(f"AITER {_assumed.get()} is assumed here, not installed: {function} cannot be loaded")
    here = _installed_version()
    if here is None or here not in MODULES[function]:
        raise ImportError(f"AITER's {function} cannot be loaded: {why_not(function, ())[0]}")
    loaded: Callable[..., Any] = vars(importlib.import_module(MODULES[function][here]))[function]
    return loaded
