"""Parts of what a launch that speculates is told, which the launches of ``tests/e2e/test_refusals.py`` cannot show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atom_plugin import resolve, speculation
from atom_plugin.flags import flag_problems


@pytest.mark.parametrize(
    ("arch", "says"), [("sm90", "on no GPU yet"), ("gfx950", "on no GPU yet"), ("cpu", "on a CPU")]
)
def test_no_machine_speculates_yet(arch: str, says: str) -> None:
    (reason,) = speculation.machine_problems(arch)
    assert says in reason and reason.endswith("drop the --speculative-* flags")


@pytest.mark.parametrize(
    ("field", "value", "parts", "who"),
    [
        ("speculative_adaptive", True, ["model"], "model"),
        ("speculative_token_map", "map.pt", ["model", "backend"], "model"),
        ("enable_multi_layer_eagle", True, ["backend"], "backend"),
    ],
)
def test_flags_that_need_more_of_sglang(field: str, value: Any, parts: list[str], who: str) -> None:
    """SGLang itself changes or asks for more before a launch with one of them gets to us."""
    flags = {flag.field: flag.served[0] for flag in speculation.FLAGS}
    assert flag_problems(speculation.FLAGS, SimpleNamespace(**flags), parts) == []
    (reason,) = flag_problems(speculation.FLAGS, SimpleNamespace(**{**flags, field: value}), parts)
    assert reason.startswith(f"--{field.replace('_', '-')} {value}: the atom {who} serves only ")


def test_a_token_map_is_no_matter_of_the_backend() -> None:
    flags = {flag.field: flag.served[0] for flag in speculation.FLAGS} | {"speculative_token_map": "map.pt"}
    assert flag_problems(speculation.FLAGS, SimpleNamespace(**flags), ["backend"]) == []


def test_the_class_of_a_draft_is_sglangs_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever SGLang would take for it, under its own name."""
    with caplog.at_level("INFO"):
        found = resolve.draft_model_architecture(
            lambda config: (SimpleNamespace, config.name), SimpleNamespace(name="D")
        )
    assert found == (SimpleNamespace, "D")
    assert caplog.messages == ["--model-impl atom: the draft D is SGLang's own, types.SimpleNamespace"]
