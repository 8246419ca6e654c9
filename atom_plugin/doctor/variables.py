"""Environment variables that are set and change what a launch runs: ours, and SGLang's, AITER's and Triton's."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass

from atom_plugin import settings
from atom_plugin.doctor.finding import Finding, fail, note

OURS = "ATOM_PLUGIN_"
#: Names that begin so are listed where they are set, whatever they mean.
OTHERS = ("SGLANG_", "SGL_", "AITER_", "TRITON_", "HIP_", "HSA_", "ROCM_", "ROCR_", "CUDA_VISIBLE", "NCCL_", "RCCL_")
_ON = ("1", "true", "on", "yes", "y")


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable that is not ours. ``changes``: what it does; ``why_not``: (value, arch) -> a remedy, or ""."""

    name: str
    changes: str
    why_not: Callable[[str, str], str]


def _never(value: str, arch: str) -> str:
    return ""


def _on(value: str) -> bool:
    return value.lower() in _ON


def _leaves_out(name: str) -> Callable[[str, str], str]:
    def why_not(value: str, arch: str) -> str:
        names = {one.strip() for one in value.split(",")}
        if name in names:
            return ""
        return f"add {name}, or unset it: SGLang serves its own model otherwise"

    return why_not


def _plugins(value: str, arch: str) -> str:
    remedy = _leaves_out("atom")(value, arch) if value else ""
    if not remedy and value and arch == "cpu":
        remedy = (
            "" if "atom_cpu" in {one.strip() for one in value.split(",")} else "add atom_cpu, the platform for CPUs"
        )
    return remedy


def _platform(value: str, arch: str) -> str:
    if value in ("", "atom_cpu"):
        return ""
    return "unset it: SGLang then leaves out all of atom-plugin, which brings atom_cpu"


def _pool_layout(value: str, arch: str) -> str:
    return "" if value == "nhd" else "unset it: the attention backend atom reads NHD pools alone"


def _heads_first(value: str, arch: str) -> str:
    return "unset it: the attention backend atom reads NHD pools alone" if _on(value) else ""


def _interpreted(value: str, arch: str) -> str:
    if not _on(value) or arch == "cpu":
        return ""
    return "unset it: Triton's kernels would be interpreted on the host, thousands of times slower"


def _other_arch(value: str, arch: str) -> str:
    return f"unset it: kernels are chosen for {arch}, which it makes the device call itself" if value else ""


VARIABLES = (
    Variable(name="SGLANG_PLUGINS", changes="which plugins SGLang loads, by name", why_not=_plugins),
    Variable(name="SGLANG_PLATFORM", changes="which platform plugin SGLang runs on", why_not=_platform),
    Variable(name="SGLANG_AITER_KV_CACHE_LAYOUT", changes="the layout of the KV pool on AMD", why_not=_pool_layout),
    Variable(name="SGLANG_USE_HND_KVCACHE", changes="the layout of the KV pool", why_not=_heads_first),
    Variable(name="TRITON_INTERPRET", changes="whether Triton kernels are interpreted", why_not=_interpreted),
    Variable(name="HSA_OVERRIDE_GFX_VERSION", changes="what an AMD device calls itself", why_not=_other_arch),
    Variable(name="SGLANG_USE_AITER", changes="AITER in SGLang's own layers: linear, MoE, norms", why_not=_never),
    Variable(name="SGLANG_USE_CPU_ENGINE", changes="SGLang's own CPU engine in place of ours", why_not=_never),
    Variable(
        name="SGLANG_EXTERNAL_MODEL_PACKAGE",
        changes="classes of --model-impl sglang and auto: a comparison is not with SGLang's own then",
        why_not=_never,
    ),
    Variable(name="SGLANG_CPU_OMP_THREADS_BIND", changes="the cores of each rank on a CPU", why_not=_never),
    Variable(name="SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD", changes="MLA's form over cached prefixes", why_not=_never),
    Variable(
        name="SGLANG_ENABLE_DETERMINISTIC_INFERENCE", changes="SGLang's kernels, for the same bits", why_not=_never
    ),
)


def check_variables(arch: str) -> list[Finding]:
    """Return what is set and matters on ``arch``, "" where there is no torch to ask."""
    findings = [*_ours()]
    named = {variable.name for variable in VARIABLES}
    for variable in VARIABLES:
        value = os.environ.get(variable.name)
        if value is None:
            continue
        remedy = variable.why_not(value, arch)
        text = f"{value!r}: {variable.changes}"
        findings.append(fail(variable.name, text, remedy) if remedy else note(variable.name, text))
    if arch.startswith("gfx") and not _on(os.environ.get("SGLANG_USE_AITER", "0")):
        text = "not set to 1: SGLang's own layers (linear, MoE, norms) do without AITER, which is slower"
        findings.append(note("SGLANG_USE_AITER", text))
    rest = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _is_other(name) and name not in named]
    if rest:
        findings.append(note("other variables", f"{len(rest)} set", rest))
    return findings


def _is_other(name: str) -> bool:
    return name.startswith(OTHERS)


def _ours() -> list[Finding]:
    findings = []
    for setting in settings.ALL:
        try:
            findings.append(Finding(setting.name, repr(setting.get())))
        except ValueError as error:
            findings.append(fail(setting.name, str(error), "correct or unset it"))
    known = [setting.name for setting in settings.ALL]
    for name in sorted(os.environ):
        if name.startswith(OURS) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            findings.append(fail(name, "is no variable of ours, and nothing reads it", f"unset it: {meant}"))
    return findings
