"""Random configs: one spec from both spellings, and an error for any required field that is missing or odd."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom_plugin.configs import ConfigError, load_spec
from tests.configs.spellings import FAMILIES, Case, Path, Values

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)

#: For a required field of each type: what no such field may be.
ODD: dict[type, list[Any]] = {
    int: [0, -1, 1.5, "12", True, [], {}, None, float("nan")],
    float: [float("nan"), float("inf"), -1.0, 0, "1.0", True, [], None],
    bool: [0, 1, "true", None, []],
    str: ["", "qwen", 7, None, [], {}],
    list: [None, "text", 7, {}, [None], [True], [0.5], ["qwen"]],
    dict: [None, "text", 7, [], {}],
}


def holder(values: Values, path: Path) -> Values:
    """Return the mapping that holds the last field of ``path``."""
    for name in path[:-1]:
        values = values[name]
    return values


def refused(values: Values, path: Path) -> str:
    """Return the message of the refusal of ``values``."""
    with pytest.raises(ConfigError) as error:
        load_spec(values)
    assert str(error.value).startswith("config: "), path
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_spec_from_both_spellings(family: str) -> None:
    """And it says what the config says, which is not changed."""

    @FEW
    @given(FAMILIES[family])
    def check(case: Case) -> None:
        before = copy.deepcopy((case.old, case.new))
        spec = load_spec(case.old)
        assert load_spec(case.new) == spec
        assert (case.old, case.new) == before
        found = asdict(spec)
        assert {name: found[name] for name in case.expected} == case.expected

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_field_is_an_error(family: str) -> None:
    """Every required field of a random config, one at a time: the message names it; no default comes in."""

    @settings(FEW, max_examples=5)
    @given(FAMILIES[family])
    def check(case: Case) -> None:
        for path in case.required:
            values = copy.deepcopy(case.old)
            del holder(values, path)[path[-1]]
            if path[-1] == "architectures":
                assert "architecture absent with model_type" in refused(values, path)
            else:
                assert path[-1] in refused(values, path)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_odd_value_is_an_error(family: str) -> None:
    """A value of another type, out of range, not a number: never taken for something else, never another exception."""

    @FEW
    @given(FAMILIES[family], st.data())
    def check(case: Case, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(case.required))
        values = copy.deepcopy(case.old)
        kind = type(holder(values, path)[path[-1]])
        odd = data.draw(st.sampled_from(ODD[kind]))
        if path[-1] == "first_k_dense_replace" and odd == 0:
            odd = -1  # zero dense layers are none
        if path[-1] == "q_lora_rank" and odd is None:
            odd = -1  # in a Kimi-Linear null means that q is not compressed
        if path[-1] == "gate_lower_bound" and odd == -1.0:
            odd = 1.0
        holder(values, path)[path[-1]] = odd
        refused(values, path)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_misspelt_field_is_an_error(family: str) -> None:
    """A field that nobody knows may change the model: it is refused by name, at either level."""

    @settings(FEW, max_examples=10)
    @given(FAMILIES[family], st.sampled_from(["rms_norm_epss", "use_sinks", "rope_scalings"]))
    def check(case: Case, name: str) -> None:
        values = copy.deepcopy(case.old)
        values.get("text_config", values)[name] = 1
        message = refused(values, (name,))
        assert name in message and ("unknown field" in message or "misspelling" in message)

    check()
