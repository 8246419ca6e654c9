"""Which packages are installed, against the ranges that we support, and whether SGLang can find our entry points."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from atom_plugin import host, settings
from atom_plugin.doctor.finding import NOT_INSTALLED, Finding, fail, note

RANGE = "SGLang range"
PYTHON = ">=3.10,<3.14"
#: Package -> (the range outside of which we know of a launch that breaks, "" for none; the range that the tests run).
RANGES = {
    "transformers": (">=4.57.6", ">=4.57.6,<=5.19.0"),
    "torch": ("", ">=2.11,<2.15"),
    "triton": ("", ">=3.6,<3.9"),
}
#: Other names that a package is distributed under: builds of PyTorch for ROCm bring a Triton of their own.
ALSO_CALLED = {"triton": ("pytorch-triton-rocm", "triton-rocm", "pytorch-triton")}
#: Names that AITER has been distributed under; built from source it may have none at all.
AITER = ("amd-aiter", "aiter")
NEEDED = ("sglang", "torch", "transformers")
ENTRY_POINTS = {
    "sglang.srt.plugins": ("atom", "atom_plugin.register:register"),
    "sglang.srt.platforms": ("atom_cpu", "atom_plugin.platform:activate"),
}


def is_missing(package: str, findings: Sequence[Finding]) -> bool:
    """Return whether ``check_versions`` did not find a package."""
    return any(finding.name == package and finding.found == NOT_INSTALLED for finding in findings)


def check_versions() -> list[Finding]:
    """Return Python's version, each package's, and what is said of SGLang's."""
    python = ".".join(map(str, sys.version_info[:3]))
    findings = [_judged("Python", python, PYTHON, PYTHON)]
    for package in ("sglang", *RANGES):
        version = installed(package)
        if version is not None:
            findings.append(_judged(package, version, *RANGES.get(package, ("", ""))))
        elif package in NEEDED:
            findings.append(fail(package, NOT_INSTALLED, _how_to_install(package)))
        else:
            findings.append(note(package, NOT_INSTALLED))
    return findings if is_missing("sglang", findings) else [*findings, _sglang_range()]


def installed(package: str) -> str | None:
    """Return the version of a package under any of its names, None where it is not installed."""
    for name in (package, *ALSO_CALLED.get(package, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_entry_points() -> list[Finding]:
    """Return whether SGLang finds our entry points, and which plugins of others it finds beside them."""
    findings = []
    for group, (name, value) in ENTRY_POINTS.items():
        points = {(point.name, point.value) for point in metadata.entry_points(group=group)}
        title = f"entry point {group}: {name}"
        if (name, value) in points:
            findings.append(Finding(title, value))
        else:
            found = ", ".join(other for its_name, other in points if its_name == name) or "absent"
            remedy = "install the package (pip install --no-deps atom-plugin): a folder on PYTHONPATH is not enough"
            findings.append(fail(title, found, remedy))
        others = sorted(f"{its_name} = {other}" for its_name, other in points - {(name, value)})
        if others:
            findings.append(note(f"other plugins of {group}", ", ".join(others)))
    return findings


def _judged(package: str, version: str, needed: str, tested: str) -> Finding:
    try:
        parsed = Version(version)
    except InvalidVersion:
        return note(package, f"{version}: no version by PEP 440, so that it cannot be compared")
    if needed and not SpecifierSet(needed).contains(parsed, prereleases=True):
        return fail(package, version, f"install {package} {needed}")
    # a local build (2.11.0+rocm7.2) is judged as the release that it was built from
    if tested and not SpecifierSet(tested).contains(parsed.public, prereleases=True):
        return note(package, f"{version}: not tested, {tested} is")
    return Finding(package, version)


def _how_to_install(package: str) -> str:
    if package == "sglang":
        return (
            "install SGLang beside the plugin: on AMD take an image that has it (lmsysorg/sglang:...-rocm...), "
            "elsewhere pip install 'atom-plugin[sglang]'"
        )
    return f"{package} comes with SGLang: install it as SGLang's own instructions say"


def _sglang_range() -> Finding:
    reason = host.why_not_version()
    if not reason:
        return Finding(RANGE, host.SUPPORTED_SGLANG)
    try:
        allowed = settings.ALLOW_SGLANG.get() and host.says_version()
    except ValueError:  # a finding of its own
        allowed = False
    if allowed:
        return note(RANGE, f"{reason}: {host.allowed_all_the_same()}")
    return fail(RANGE, reason, host.what_to_do_about_version())
