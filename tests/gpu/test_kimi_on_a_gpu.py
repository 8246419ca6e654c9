"""The tiny Kimi-K2 on a GPU, in bf16 and under graphs: our model and backend beside SGLang's, in all four corners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_models_on_a_gpu import figures, run_engine, solved_problems

pytestmark = pytest.mark.gpu

KIMI = Path(__file__).parents[2] / "examples" / "tiny-kimi-k2"
MODELS = {"atom": "atom_plugin.models.kimi_k2.KimiK2ForCausalLM"}


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Return what SGLang's model says on SGLang's Triton backend: FA3 and FlashMLA take latents of 512 alone."""
    found, log = run_engine(KIMI, solved_problems(), flags("sglang", "triton"))
    assert found is not None, log[-5000:]
    return found


def flags(model_impl: str, attention_backend: str) -> dict[str, Any]:
    """Return the flags of one corner."""
    return {"dtype": "bfloat16", "model_impl": model_impl, "attention_backend": attention_backend}


@pytest.mark.parametrize("corner", [("atom", "atom"), ("sglang", "atom"), ("atom", "triton")], ids=" x ".join)
def test_corner(corner: tuple[str, str], theirs: Any) -> None:
    """Prefill un-absorbed, decode absorbed under graphs: the logprobs of SGLang's model on SGLang's backend."""
    model_impl, backend = corner
    ours, log = run_engine(KIMI, solved_problems(), flags(model_impl, backend))
    assert ours is not None, log[-5000:]
    assert (MODELS["atom"] in log) == (model_impl == "atom")
    assert ("mla_attention=triton" in log) == (backend == "atom")
    found = [
        abs(a - b) for x, y in zip(ours["scored"], theirs["scored"], strict=True) for a, b in zip(x, y, strict=True)
    ]
    equal = [a == b for x, y in zip(ours["tokens"], theirs["tokens"], strict=True) for a, b in zip(x, y, strict=True)]
    print(f"\nKimi, {model_impl} x {backend}: {figures(found)}; equal greedy tokens {sum(equal) / len(equal):.3f}")
    assert sum(found) / len(found) < 0.05
