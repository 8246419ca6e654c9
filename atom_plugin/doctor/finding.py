"""One check of the doctor, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: "fail": a launch that asks for atom would break, or not do what it is asked for; "note": worth knowing.
Status = Literal["ok", "note", "fail"]
NOT_INSTALLED = "not installed"
BROKEN_TORCH = "import torch"
_MARKS: dict[Status, str] = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One check: its ``name``, what was ``found``, and the ``remedy`` of a fail; ``details``: lines under it."""

    name: str
    found: str
    remedy: str = ""
    status: Status = "ok"
    details: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.status == "fail") != bool(self.remedy):
            raise ValueError(f"{self.name}: a fail has a remedy, and nothing else has one")


def fail(name: str, found: str, remedy: str, details: Iterable[str] = ()) -> Finding:
    """Return a finding that breaks a launch."""
    return Finding(name, found, remedy, "fail", tuple(details))


def note(name: str, found: str, details: Iterable[str] = ()) -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(name, found, "", "note", tuple(details))


def has_failed(findings: Sequence[Finding]) -> bool:
    """Return whether a launch would break."""
    return any(finding.status == "fail" for finding in findings)


def lacks_torch(findings: Sequence[Finding]) -> bool:
    """Return whether torch is not installed, or cannot be imported."""
    return any(
        finding.name == BROKEN_TORCH or (finding.name == "torch" and finding.found == NOT_INSTALLED)
        for finding in findings
    )


def report(findings: Sequence[Finding]) -> str:
    """Return the findings as text for a person, and a last line that sums them up."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.status]}  {finding.name}: {finding.found}")
        lines += [f"        {detail}" for detail in finding.details]
        lines += [f"      -> {finding.remedy}"] if finding.remedy else []
    failed = [finding.name for finding in findings if finding.status == "fail"]
    verdict = "nothing here would break a launch with atom"
    if failed:
        verdict = f"{len(failed)} of {len(findings)} checks would break a launch with atom: {', '.join(failed)}"
    return "\n".join([*lines, verdict])


def as_json(findings: Sequence[Finding], outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Return the findings, and the outcomes of the self-test, as JSON."""
    values = {"findings": [asdict(finding) for finding in findings], "selftest": list(outcomes)}
    return json.dumps(values, indent=2, allow_nan=False)
