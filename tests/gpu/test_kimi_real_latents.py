"""Kimi-K2 with latent rows of 512 + 64 on a GPU: {SGLang's model, ours} x {SGLang's backend, ours} on one checkpoint.

Each engine scores whole sequences, continues them under decode graphs, and scores tails after cached prefixes: short
ones in the absorbed form, long ones with the prefix expanded, in chunks of 1,024 tokens. All are judged by
transformers' model in fp32: bf16 errors of a random model with peaky attention are large, and ours may not be larger
than SGLang's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.kimi_checkpoint import VOCAB, Weights, make_kimi, oracle_of, scores_of
from tests.gpu.test_models_on_a_gpu import figures, run_engine

pytestmark = pytest.mark.gpu

#: (cached prefix, new tokens): the last three are past the cross-over.
TAILS = [(1, 1), (1, 7), (63, 2), (64, 5), (65, 6), (4000, 3), (4000, 7), (64, 300), (1000, 400), (3000, 1500)]
Errors = Callable[..., dict[str, list[float]]]
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
def errors(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Return what runs an engine on a checkpoint, each once, and says how far each part is from transformers."""
    done: dict[str, dict[str, list[float]]] = {}
    oracles: dict[str, Any] = {}
    root = tmp_path_factory.mktemp("kimi")

    def once(weights: Weights, model_impl: str, backend: str, **flags: Any) -> dict[str, list[float]]:
        if weights not in oracles:
            make_kimi(root / weights, weights)
            oracles[weights] = oracle_of(root / weights).cuda()
        key = f"{weights} {model_impl} {backend} {flags}"
        if key not in done:
            done[key] = errors_of(run_one(root / weights, model_impl, backend, **flags), oracles[weights])
            for part, found in done[key].items():
                print(f"\n{key}, {part}, against transformers' fp32: {figures(found)}", end="")
        return done[key]

    return once


def errors_of(result: dict[str, Any], oracle: Any) -> dict[str, list[float]]:
    """Return part -> absolute differences of logprobs."""
    whole, after = sequences(), tails()
    parts = {
        "scored": (result["scored"], [scores_of(oracle, ids, 1) for ids in whole]),
        "decoded": (
            result["decoded"],
            [scores_of(oracle, ids + new, len(ids)) for ids, new in zip(whole, result["tokens"], strict=True)],
        ),
        "tails": (result["tails"], [scores_of(oracle, one["ids"], one["cached"] + 1) for one in after]),
    }
    return {
        name: [abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
        for name, (ours, theirs) in parts.items()
    }


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


def assert_no_worse(ours: dict[str, list[float]], theirs: dict[str, list[float]], factor: float) -> None:
    """Assert that the mean error of each part is at most ``factor`` times that of the other run."""
    for part, found in ours.items():
        mean, other = sum(found) / len(found), sum(theirs[part]) / len(theirs[part])
        assert mean <= factor * other, f"{part}: mean error {mean:.2e}, SGLang's own {other:.2e}"


@pytest.mark.parametrize(("model_impl", "backend"), [("atom", "atom"), ("sglang", "atom"), ("atom", "fa3")])
def test_four_corners(model_impl: str, backend: str, errors: Errors) -> None:
    """Each of the others beside SGLang's model on FA3."""
    assert_no_worse(errors("bf16", model_impl, backend), errors("bf16", "sglang", "fa3"), 1.2)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_quantised_weights(weights: Weights, errors: Errors) -> None:
    """Through SGLang's quantised layers and our table of weights."""
    assert_no_worse(errors(weights, "atom", "atom"), errors(weights, "sglang", "fa3"), 1.2)


def test_a_latent_cache_in_fp8(errors: Errors) -> None:
    """Beside a bf16 cache: what rounding latents to three bits of mantissa costs, and no more."""
    assert_no_worse(
        errors("bf16", "atom", "atom", kv_cache_dtype="fp8_e4m3", page_size=64), errors("bf16", "sglang", "fa3"), 4.0
    )
