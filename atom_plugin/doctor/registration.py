"""Whether SGLang loads us and every hook, model and backend of ours takes: SGLang itself only logs what does not."""

from __future__ import annotations

import pkgutil

from atom_plugin import host
from atom_plugin.doctor.finding import Finding, fail


def check_registration(*, aiter_breaks_imports: bool) -> list[Finding]:
    """Load the plugins as SGLang does, then look at everything of ours in this process.

    ``aiter_breaks_imports``: AITER was found to be what SGLang cannot import.
    """
    from atom_plugin import hooks, register

    try:
        loaded = _loaded_by_sglang()
        if not register.complete:
            register.register()  # raises what SGLang has swallowed
        register.prepare_serving()
        hooks.install([register.MEDIA])  # of processes that tokenize
    except (hooks.HookError, ImportError, AttributeError, ValueError, OSError) as error:
        return [fail("registration", str(error), f"use SGLang {host.SUPPORTED_SGLANG}")]
    except RuntimeError as error:  # what AITER's import raises without ROCm, through SGLang's
        remedy = "see aiter above" if aiter_breaks_imports else "repair or uninstall what raises this"
        return [fail("registration", f"SGLang cannot be imported: {error}", remedy)]
    return [loaded, *_hooks(), *_models(), *_backend()]


def _loaded_by_sglang() -> Finding:
    from sglang.srt.plugins import load_plugins

    from atom_plugin import register

    load_plugins()
    if register.loaded:
        return Finding("loaded by SGLang", "yes")
    remedy = (
        "make the entry points and SGLANG_PLUGINS and SGLANG_PLATFORM above right: SGLang serves its own model else"
    )
    return fail("loaded by SGLang", "no: SGLang did not call our entry point", remedy)


def _hooks() -> list[Finding]:
    from atom_plugin import hooks

    lost = "uninstall the plugin that took it off again, or report which one it is"
    return [
        Finding(f"hook {row.target}", row.kind)
        if hooks.is_applied(row)
        else fail(f"hook {row.target}", "not applied", lost)
        for row in hooks.installed()
    ]


def _models() -> list[Finding]:
    from atom_plugin.resolve import CLASSES

    findings = []
    for (architecture, kind), path in CLASSES.items():
        name = f"model {architecture} ({kind})"
        try:
            pkgutil.resolve_name(path)
        except (ImportError, AttributeError, RuntimeError) as error:
            remedy = f"use SGLang {host.SUPPORTED_SGLANG}, and look at what cannot be imported"
            findings.append(fail(name, f"{path} cannot be imported: {error}", remedy))
        else:
            findings.append(Finding(name, path))
    return findings


def _backend() -> list[Finding]:
    from atom_plugin import register

    problems = host.why_backend_is_unknown(register.NAME)
    if problems:
        return [fail("attention backend", "; ".join(problems), f"use SGLang {host.SUPPORTED_SGLANG}")]
    return [Finding("attention backend", register.NAME)]
