"""What would break a launch, found without launching: SGLang only logs a plugin or a hook that fails.

Needs neither SGLang nor torch: what is missing is a finding.
"""

from __future__ import annotations

import importlib

from atom_plugin.doctor.aiter import check_aiter
from atom_plugin.doctor.finding import BROKEN_TORCH, Finding, as_json, fail, has_failed, lacks_torch, note, report
from atom_plugin.doctor.resources import check_resources
from atom_plugin.doctor.variables import check_variables
from atom_plugin.doctor.versions import RANGE, check_entry_points, check_versions, is_missing

__all__ = ["Finding", "as_json", "examine", "fail", "has_failed", "lacks_torch", "note", "report"]


def examine() -> list[Finding]:
    """Return every finding, in the order in which a launch would meet them.

    Without SGLang and torch, what is left; for an SGLang that is refused, all but the registration that it refuses.
    """
    versions = check_versions()
    findings = [*versions, *check_entry_points()]
    broken = [] if is_missing("torch", versions) else _torch_problems()
    if broken or is_missing("torch", versions):
        return [*findings, *broken, *check_aiter(""), *check_variables(""), *check_resources()]
    from atom_plugin import device
    from atom_plugin.doctor.machine import check_machine
    from atom_plugin.doctor.rows import check_rows

    arch = device.arch()
    of_aiter = check_aiter(arch)
    findings += [*check_machine(), *of_aiter, *check_variables(arch), *check_rows(arch), *check_resources()]
    refused = any(finding.name == RANGE and finding.status == "fail" for finding in versions)
    if is_missing("sglang", versions) or refused:
        return findings
    from atom_plugin.doctor.registration import check_registration

    return [*findings, *check_registration(aiter_breaks_imports=has_failed(of_aiter))]


def _torch_problems() -> list[Finding]:
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a library of the driver or of ROCm is missing
        return [fail(BROKEN_TORCH, str(error), "install the torch that was built for this machine's driver")]
    return []
