"""Kimi-K2 with latent rows of 512 + 64 on a GPU: {SGLang's model, ours} x {SGLang's backend, ours} on one checkpoint.

Each engine scores whole sequences, continues them under decode graphs, and scores tails after cached prefixes: short
ones in the absorbed form, long ones with the prefix expanded, in chunks of 1,024 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.kimi_checkpoint import VOCAB, Weights, make_kimi
from tests.gpu.test_models_on_a_gpu import figures, run_engine

pytestmark = pytest.mark.gpu

#: (cached prefix, new tokens): the last three are past the cross-over.
TAILS = [(1, 1), (1, 7), (63, 2), (64, 5), (65, 6), (4000, 3), (4000, 7), (64, 300), (1000, 400), (3000, 1500)]
Run = Callable[..., dict[str, Any]]
ENVIRONMENT = {"SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "0", "SGLANG_MAX_KV_CHUNK_CAPACITY": "1024"}


def sequences() -> list[list[int]]:
    """Return sequences of odd lengths, which stand for the first prompts of a server."""
    draw = random.Random(0)
    return [[draw.randrange(2, VOCAB) for _ in range(length)] for length in (1, 2, 5, 17, 63, 64, 65, 200, 513, 1025)]


def tails() -> list[dict[str, Any]]:
    """Return requests that begin with what the server has cached."""
    draw = random.Random(1)
    longest = [draw.randrange(2, VOCAB) for _ in range(max(cached for cached, _ in TAILS))]
    return [
        {"cached": cached, "ids": longest[:cached] + [draw.randrange(2, VOCAB) for _ in range(new + 1)]}
        for cached, new in TAILS
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what runs an engine on a checkpoint, each once."""
    done: dict[str, dict[str, Any]] = {}
    root = tmp_path_factory.mktemp("kimi")

    def once(weights: Weights, model_impl: str, backend: str, **flags: Any) -> dict[str, Any]:
        if not (root / weights).exists():
            make_kimi(root / weights, weights)
        key = f"{weights} {model_impl} {backend} {flags}"
        if key not in done:
            done[key] = run_one(root / weights, model_impl, backend, **flags)
        return done[key]

    return once


def run_one(folder: Path, model_impl: str, backend: str, **flags: Any) -> dict[str, Any]:
    """Run one engine; the log has to say that what was asked for is what runs."""
    engine = {
        "skip_tokenizer_init": True, "model_impl": model_impl, "attention_backend": backend,
        "cuda_graph_max_bs_decode": 16, "chunked_prefill_size": 8192, "max_total_tokens": 40000,
        "skip_server_warmup": True, **flags,
    }  # fmt: skip
    result, log = run_engine(folder, sequences(), engine, ENVIRONMENT, tails=tails())
    assert result is not None, log[-6000:]
    assert ("atom_plugin.models.kimi_k2.KimiK2ForCausalLM" in log) == (model_impl == "atom")
    assert ("mla_attention=triton" in log) == (backend == "atom")
    return dict(result)


def compare(name: str, ours: dict[str, Any], theirs: dict[str, Any], mean: float) -> None:
    """Print how far two runs are apart, and assert that the means of their scores are within ``mean``."""
    for part in ("scored", "decoded", "tails"):
        pairs = list(zip(ours[part], theirs[part], strict=True))
        if part == "decoded":  # as long as the tokens are the same
            pairs = [
                (x[: same(a, b)], y[: same(a, b)])
                for (x, y), a, b in zip(pairs, ours["tokens"], theirs["tokens"], strict=True)
            ]
        found = [abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True)]
        print(f"\n{name}, {part}: {figures(found)}", end="")
        assert sum(found) / len(found) < mean, f"{name}, {part}: {figures(found)}"


def same(ours: list[int], theirs: list[int]) -> int:
    """Return how many tokens from the first on are equal, and the first that is not."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


@pytest.mark.parametrize(("model_impl", "backend"), [("atom", "atom"), ("sglang", "atom"), ("atom", "fa3")])
def test_four_corners(model_impl: str, backend: str, run: Run) -> None:
    """Each of the others beside SGLang's model on FA3."""
    compare(f"{model_impl} x {backend}", run("bf16", model_impl, backend), run("bf16", "sglang", "fa3"), 0.05)


@pytest.mark.parametrize(
    ("weights", "flags"), [("fp8", {}), ("int4", {}), ("bf16", {"kv_cache_dtype": "fp8_e4m3", "page_size": 64})]
)
def test_quantised(weights: Weights, flags: dict[str, Any], run: Run) -> None:
    """Weights through SGLang's quantised layers and our table, and a latent cache in FP8: as SGLang's model on FA3.

    The FP8 cache is compared with a bf16 one: SGLang's FA3 rounds queries to FP8 too where the cache is.
    """
    theirs, ours = run(weights, "sglang", "fa3"), run(weights, "atom", "atom", **flags)
    compare(f"{weights} {flags}", ours, theirs, 0.15 if flags else 0.05)
