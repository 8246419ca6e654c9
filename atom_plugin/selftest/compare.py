"""How far a row's output is from the reference's, in the units of the tolerance that the row states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_plugin.dispatch import Tolerance


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest error, and the largest as a share of ``atol + rtol * |expected|``: more than 1 is wrong.

    Both are infinite where one side has a number and the other has none, or where tensors do not even have one shape.
    ``what``: which output, and what is wrong with it in words where numbers do not say it.
    """

    what: str
    error: float
    share: float


def compare(what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> Difference:
    """Return how far ``actual`` is from ``expected``, both on the CPU; equal infinities are no difference."""
    if actual.shape != expected.shape:
        found = f"{what} has shape {tuple(actual.shape)}, the reference {tuple(expected.shape)}"
        return Difference(what=found, error=float("inf"), share=float("inf"))
    if not expected.numel():
        return Difference(what=what, error=0.0, share=0.0)
    ours, theirs = actual.double(), expected.double()
    strays = ((ours.isfinite() != theirs.isfinite()) | (ours.isinf() & (ours != theirs))).sum().item()
    if strays:
        found = f"{what}: {int(strays)} of {ours.numel()} values are NaN or infinite on one side alone"
        return Difference(what=found, error=float("inf"), share=float("inf"))
    finite = theirs.isfinite()
    error = (ours - theirs)[finite].abs()
    allowed = tolerance.atol + tolerance.rtol * theirs[finite].abs()
    # no error is a share of 0 also where nothing is allowed
    share = torch.where(error == 0, error, error / allowed)
    largest = [float(x.max()) if x.numel() else 0.0 for x in (error, share)]
    return Difference(what=what, error=largest[0], share=largest[1])


def compare_bytes(what: str, actual: torch.Tensor, expected: torch.Tensor) -> Difference:
    """Return the difference of tensors that have to be equal in every byte, NaN included."""
    ours, theirs = (x.contiguous().view(torch.uint8) for x in (actual, expected))
    wrong = int((ours != theirs).sum())
    if not wrong:
        return Difference(what=what, error=0.0, share=0.0)
    found = compare(what, actual.float(), expected.float(), Tolerance(rtol=0.0, atol=0.0))
    return Difference(
        what=f"{what}: {wrong} of {ours.numel()} bytes differ", error=found.error, share=max(found.share, float("inf"))
    )
