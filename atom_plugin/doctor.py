"""What would break a launch, found without launching: SGLang only logs a plugin or a hook that fails."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from importlib import metadata

from atom_plugin import host, settings

NOT_INSTALLED = "not installed"
RANGE = "SGLang range"
PACKAGES = ("sglang", "transformers", "torch", "triton", "amd-aiter")
ENTRY_POINTS = {
    "sglang.srt.plugins": ("atom", "atom_plugin.register:register"),
    "sglang.srt.platforms": ("atom_cpu", "atom_plugin.platform:activate"),
}


@dataclass(frozen=True)
class Finding:
    """One check: its ``name``, what was found, and the remedy, "" when nothing is wrong."""

    name: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Return every finding, in the order in which a launch would meet them.

    Without SGLang and torch, what is left; for an SGLang that is refused, all but the registration that it refuses.
    """
    findings = [*_versions(), *_entry_points(), *_settings()]
    missing = {finding.name for finding in findings if finding.found == NOT_INSTALLED}
    if missing & {"sglang", "torch"}:
        return findings
    findings += [*_machine(), *_forced_rows()]
    refused = any(finding.name == RANGE and finding.remedy for finding in findings)
    return findings if refused else [*findings, *_registration()]


def report(findings: list[Finding], *, as_json: bool) -> str:
    """Return the findings as text for a person, or as JSON."""
    if as_json:
        return json.dumps([asdict(finding) for finding in findings], indent=2)
    lines = [
        f"{'FAIL' if finding.remedy else 'ok  '}  {finding.name}: {finding.found}"
        + (f"\n      -> {finding.remedy}" if finding.remedy else "")
        for finding in findings
    ]
    return "\n".join(lines)


def _versions() -> list[Finding]:
    found = []
    for package in PACKAGES:
        try:
            found.append(Finding(package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            needed = package in ("sglang", "torch", "transformers")
            found.append(Finding(package, NOT_INSTALLED, "pip install 'atom-plugin[sglang]'" if needed else ""))
    sglang = found[0].found
    return found if sglang == NOT_INSTALLED else [*found, _sglang_range()]


def _sglang_range() -> Finding:
    reason = host.why_not_version()
    if not reason:
        return Finding(RANGE, host.SUPPORTED_SGLANG)
    try:
        allowed = settings.ALLOW_SGLANG.get() and host.says_version()
    except ValueError:  # a finding of its own
        allowed = False
    if allowed:
        return Finding(RANGE, f"{reason}: {host.allowed_all_the_same()}")
    return Finding(RANGE, reason, host.what_to_do_about_version())


def _entry_points() -> list[Finding]:
    found = []
    for group, (name, value) in ENTRY_POINTS.items():
        here = [point.value for point in metadata.entry_points(group=group) if point.name == name]
        remedy = (
            ""
            if value in here
            else "install the package (pip install atom-plugin), a folder on PYTHONPATH is not enough"
        )
        found.append(Finding(f"entry point {group}: {name}", ", ".join(here) or "absent", remedy))
    return found


def _machine() -> list[Finding]:
    from atom_plugin import device, platform

    return [
        Finding("device", device.arch()),
        Finding("CPU platform", platform.why_inactive() or "serves here: no accelerator was found"),
    ]


def _forced_rows() -> list[Finding]:
    from atom_plugin.attention.tables import forced_rows

    try:
        forced_rows()
    except ValueError as error:
        return [Finding("forced rows", str(error), "correct or unset it")]
    return []


def _settings() -> list[Finding]:
    found = []
    for setting in settings.ALL:
        try:
            found.append(Finding(setting.name, repr(setting.get())))
        except ValueError as error:
            found.append(Finding(setting.name, str(error), "correct or unset it"))
    listed = os.environ.get("SGLANG_PLUGINS", "")
    if listed and "atom" not in {name.strip() for name in listed.split(",")}:
        found.append(Finding("SGLANG_PLUGINS", listed, "add atom or unset it: SGLang serves its own model otherwise"))
    selected = os.environ.get("SGLANG_PLATFORM", "")
    if selected not in ("", "atom_cpu"):
        found.append(
            Finding(
                "SGLANG_PLATFORM",
                selected,
                "unset it: SGLang then leaves out all of atom-plugin, which brings atom_cpu",
            )
        )
    return found


def _registration() -> list[Finding]:
    from atom_plugin import hooks, register
    from atom_plugin.resolve import CLASSES

    try:
        if not register.complete:
            register.register()
        register.prepare_serving()
    except (hooks.HookError, ImportError, AttributeError) as error:
        return [Finding("registration", str(error), f"use SGLang {host.SUPPORTED_SGLANG}")]
    except RuntimeError as error:  # what AITER's import raises without ROCm, through SGLang's
        return [Finding("registration", f"SGLang cannot be imported: {error}", "uninstall what raises this")]
    found = [
        Finding(f"hook {row.target}", row.kind, "" if hooks.is_applied(row) else "another plugin took it off again")
        for row in hooks.installed()
    ]
    return [*found, *(Finding(f"model {name} ({kind})", path) for (name, kind), path in CLASSES.items())]
