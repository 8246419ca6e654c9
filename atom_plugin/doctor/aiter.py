"""Which AITER is here and whether it can be imported: SGLang imports it wherever it is installed."""

from __future__ import annotations

import signal
import subprocess
import sys

from atom_plugin import aiter_lib
from atom_plugin.doctor.finding import NOT_INSTALLED, Finding, fail, note
from atom_plugin.doctor.versions import AITER, installed

#: Seconds for ``import aiter``, which builds a module at its first import on ROCm.
IMPORT_LIMIT = 300
_PROGRAM = "import aiter"


def check_aiter(arch: str) -> list[Finding]:
    """Return what is known of AITER on ``arch``, "" where there is no torch to ask."""
    version = aiter_lib.version()
    names = [f"{name} {found}" for name in AITER if (found := installed(name)) is not None]
    if version is None:
        found = NOT_INSTALLED + (f" as a package, though {names[0]} is listed" if names else "")
        is_amd = arch.startswith("gfx")
        if is_amd:
            found += ": our Triton kernels run in its place, and SGLang's own layers do without it"
        return [note("aiter", found)]
    title = f"{', '.join(names) or 'without a version of its own'}, taken for AITER {version}"
    findings = [_import_finding(title, arch)]
    functions = _functions()
    if functions:
        findings.append(note("aiter functions", f"{len(functions)} of {len(aiter_lib.MODULES)} not called", functions))
    return findings


def _functions() -> list[str]:
    """Return why functions of the AITER that is installed are not called: those that it lacks or that have changed."""
    found = []
    for function in aiter_lib.MODULES:
        # what a row passes is the row's to know: every parameter without a default is asked for here
        reasons = [reason for reason in aiter_lib.why_not(function, ()) if " needs " not in reason]
        found += [f"{function}: {reason}" for reason in reasons]
    return found


def _import_finding(title: str, arch: str) -> Finding:
    status, said = _import()
    if status == 0:
        return Finding("aiter", title)
    remedy = "pip uninstall " + (next((name for name in AITER if installed(name) is not None), "amd-aiter"))
    if arch.startswith("gfx"):
        remedy = "install an AITER that was built for this ROCm and this torch, or uninstall it to run without"
    else:
        remedy += f": this machine ({arch or 'without torch'}) has no ROCm, and SGLang's imports end where AITER's does"
    return fail("aiter", f"{title}, cannot be imported: {said}", remedy)


def _import() -> tuple[int, str]:
    """Return (exit status, last line that was said) of a process that imports AITER."""
    command = [sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return 1, f"it did not end within {IMPORT_LIMIT} seconds"
    if done.returncode < 0:
        return done.returncode, f"signal {-done.returncode} ({signal.strsignal(-done.returncode)}) ended the process"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return done.returncode, lines[-1] if lines else "it said nothing"
