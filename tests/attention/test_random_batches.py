"""Random requests through random steps, on one backend: each step is the oracle's, whatever came before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.attention.world import Shape, World

STEPS = st.lists(
    st.tuples(
        st.sampled_from([ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY]),
        st.lists(st.sampled_from([0, 1, 1, 2, 3, 17, 40]), min_size=4, max_size=4),
        st.permutations(range(4)),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=STEPS,
    cached=st.lists(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65]), min_size=4, max_size=4),
    page_size=st.sampled_from([1, 16, 64]),
    window=st.sampled_from([-1, -1, 5, 64]),
    logit_cap=st.sampled_from([0.0, 0.0, 3.0]),
    kv_dtype=st.sampled_from([None, torch.float8_e4m3fn]),
    seed=st.integers(0, 2**16),
)
def test_every_step_is_the_oracles(
    steps: list[Any],
    cached: list[int],
    page_size: int,
    window: int,
    logit_cap: float,
    kv_dtype: torch.dtype | None,
    seed: int,
) -> None:
    shape = Shape(page_size=page_size, window=window, logit_cap=logit_cap, kv_dtype=kv_dtype, k_scale=0.5, v_scale=2.0)
    world = World(shape, seed=seed)
    backend, requests = world.backend(), [world.add(length) for length in cached]
    for mode, nums, order, count in steps:
        chosen = [requests[index] for index in order[:count]]
        if mode.is_decode():
            news = [(request, 1) for request in chosen]
        elif mode.is_target_verify():
            news = [(request, 1 + nums[0] % 8) for request in chosen]
        else:
            news = [(request, num) for request, num in zip(chosen, nums, strict=False)]
            if not any(len(request) + num for request, num in news):
                continue
        step = world.step(mode, news)
        torch.testing.assert_close(world.run(backend, step), step.expected, rtol=1e-5, atol=1e-5)


def test_the_property_fails_for_a_backend_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_plugin.attention import metadata

    longest = metadata._step_of

    def one_short(forward_batch: Any) -> Any:
        step = longest(forward_batch)
        object.__setattr__(step, "seq_lens_B", step.seq_lens_B - 1)
        return step

    monkeypatch.setattr(metadata, "_step_of", one_short)
    world = World()
    step = world.step(ForwardMode.DECODE, [(world.add(40), 1)])
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(world.run(world.backend(), step), step.expected, rtol=1e-5, atol=1e-5)
