"""Which rows of each op can run on this machine, on small layers of both kinds, and why the others cannot."""

from __future__ import annotations

from atom_plugin.attention.tables import forced_rows
from atom_plugin.doctor.finding import Finding, fail
from atom_plugin.selftest.cells import standard_verdicts


def check_rows(arch: str) -> list[Finding]:
    """Return a finding an op, with a line a row, and whether the forced rows are ones that there are."""
    findings = []
    try:
        forced_rows()
    except ValueError as error:
        findings.append(fail("forced rows", str(error), "correct or unset it"))
    for op, rows in standard_verdicts(arch).items():
        able = [row for row, (count, _) in rows.items() if count]
        details = [
            f"{row}: runs" + (f"; not everywhere: {'; '.join(reasons)}" if reasons else "")
            if count
            else f"{row}: does not run: {'; '.join(reasons)}"
            for row, (count, reasons) in rows.items()
        ]
        if able:
            findings.append(Finding(f"op {op}", ", ".join(able), details=tuple(details)))
        else:
            remedy = f"no kernel of {op} runs on {arch}: use --model-impl sglang with another --attention-backend"
            findings.append(fail(f"op {op}", "no row runs here", remedy, details))
    return findings
