"""The tiny Kimi-K2 on a GPU, in bf16 and under graphs: our model beside SGLang's, both on our backend.

transformers in fp32 judges both: bf16 rounds in other places in each, and ours may not be further off than SGLang's.
SGLang's own backends do not take this checkpoint on a GPU: FA3 and FlashMLA have latents of 512 alone, and the Triton
one does not compile for 64 (0.5.17).
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.e2e import oracle
from tests.gpu.engine import ON_GPU
from tests.gpu.modes import Job, Run, apart, assert_ran, engine_of, mean, root
from tests.gpu.test_models_on_a_gpu import figures, solved_problems

__all__ = ["root"]
pytestmark = pytest.mark.gpu

OURS = "atom_plugin.models.kimi_k2.KimiK2ForCausalLM"


@functools.cache
def kimi() -> Job:
    """Return the checkpoint and held-out problems, solved, whole and cut."""
    solved = solved_problems()
    fragments = [ids[: 9 + index % 17] for index, ids in enumerate(solved[:16])]
    whole = [token for one in solved[:16] for token in one]
    return Job(
        "kimi", lambda folder: oracle.CHECKPOINTS["kimi"], solved, fragments, whole, {"attention_backend": "atom"}
    )


def error(run: Run, what: str) -> float:
    """Return the mean difference of scored logprobs from transformers in fp32."""
    found = apart(run.answers["scored"], oracle.logprobs("kimi", kimi().ids))
    print(f"\n{what}, against transformers' fp32: {figures(found)}", end="")
    return mean(found)


@pytest.mark.parametrize("prefill_graphs", ["disabled", "breakable"])
def test_our_model_beside_sglangs(prefill_graphs: str, root: Path) -> None:
    """Prefill un-absorbed, or absorbed where it is captured; decode absorbed under graphs."""
    theirs = engine_of(kimi(), {"model_impl": "sglang"}, root)
    ours = engine_of(kimi(), {"model_impl": "atom", "cuda_graph_backend_prefill": prefill_graphs}, root)
    for run, is_ours in ((theirs, False), (ours, True)):
        assert (OURS in run.log) == is_ours
        assert f"mla_attention={'triton' if ON_GPU else 'eager'}" in run.log
    assert_ran(ours, DECODE_graph=True, EXTEND_graph=prefill_graphs == "breakable")
    found, bound = error(ours, f"ours, prefill graphs {prefill_graphs}"), 1.2 * error(theirs, "SGLang's model")
    answers = list(zip(ours.answers["tokens"], theirs.answers["tokens"], strict=True))
    print(f"\n{sum(mine == others for mine, others in answers)} of {len(answers)} greedy answers are SGLang's")
    assert found <= bound
