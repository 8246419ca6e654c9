"""{SGLang's model, ours} x {torch_native, atom}: all four corners give transformers' logprobs and answers, in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import checks
import oracle
import pytest
import torch
from server import Server, serve

MODELS = {
    ("moe", "sglang"): "sglang.srt.models.qwen3_moe.Qwen3MoeForCausalLM",
    ("moe", "atom"): "atom_plugin.models.qwen3_moe.Qwen3MoeForCausalLM",
    ("dense", "sglang"): "sglang.srt.models.qwen3.Qwen3ForCausalLM",
    ("dense", "atom"): "atom_plugin.models.qwen3.Qwen3ForCausalLM",
}
BACKENDS = {
    "torch_native": "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
    "atom": "atom_plugin.attention.backend.AtomAttentionBackend",
}
CORNERS = [(checkpoint, impl, backend) for checkpoint, impl in MODELS for backend in BACKENDS]
#: The dense model shares all but its MLP with the other, and SGLang's own on its own backend is none of ours.
SLOW = [
    corner
    for corner in CORNERS
    if (corner[0] == "dense" and corner[1:] != ("atom", "atom")) or corner[1:] == ("sglang", "torch_native")
]
COUNT = 200


def param(corner: tuple[str, str, str]) -> Any:
    """Return a corner as pytest takes it."""
    return pytest.param(corner, marks=[pytest.mark.slow] if corner in SLOW else [])


@pytest.fixture(scope="module", params=map(param, CORNERS), ids="-".join)
def corner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """Serve one corner; under `--model-impl atom` the atom backend is the default and is not named."""
    checkpoint, impl, backend = request.param
    flags = ["--dtype", "float32"]
    if impl == "atom":
        flags += ["--model-impl", "atom"]
    if (impl, backend) != ("atom", "atom"):
        flags += ["--attention-backend", backend]
    with serve(oracle.CHECKPOINTS[checkpoint], *flags, folder=tmp_path_factory.mktemp("corner")) as server:
        (rank,) = server.ranks()
        assert rank["model"] == MODELS[checkpoint, impl]
        assert rank["backends"] == [BACKENDS[backend]]
        yield server, checkpoint


def test_prefill_logprobs(corner: tuple[Server, str]) -> None:
    """200 solved problems, teacher-forced."""
    server, checkpoint = corner
    sequences = checks.solved(checkpoint, COUNT)
    found = checks.prefill_differences(server, checkpoint, sequences)
    if checkpoint == "moe":
        config = oracle.model(checkpoint).config
        for problem, ids in enumerate(sequences):
            margins = oracle.router_margins(checkpoint, ids, config.num_experts_per_tok)
            for layer, token in (margins < checks.MARGIN).nonzero().tolist():
                print(f"router near-tie: problem {problem} layer {layer} token {token}: {margins[layer, token]:.1e}")
    checks.assert_fp32(found, "200 problems")


def test_greedy_answers(corner: tuple[Server, str]) -> None:
    """200 greedy answers: accuracy within 1 point of transformers'; and decode's logprobs where it is unsure."""
    server, checkpoint = corner
    asked = checks.prompts(checkpoint, COUNT)
    answers = checks.decode(server, asked, 96)
    outputs = [[entry[1] for entry in one["meta_info"]["output_token_logprobs"]] for one in answers]
    texts = [oracle.tokenizer(checkpoint).decode(ids, skip_special_tokens=True) for ids in outputs]
    right = [is_right(text, problem["number"]) for text, problem in zip(texts, oracle.problems(COUNT), strict=True)]
    theirs = hf_accuracy(checkpoint)
    ours = sum(right) / COUNT
    print(f"accuracy {ours:.3f}, transformers {theirs:.3f}")
    assert abs(ours - theirs) <= 0.01
    assert theirs > 0.7, "a checkpoint that cannot answer proves nothing"
    checks.assert_fp32(checks.decode_differences(server, checkpoint, checks.fragments(checkpoint, 24), 24), "decode")


def test_radix_cache_and_concurrency(corner: tuple[Server, str]) -> None:
    """Cached prefixes of any length, and 16 clients at once with one that goes away."""
    server, checkpoint = corner
    checks.assert_warm_equals_cold(server, checkpoint)
    checks.assert_serves_many_at_once(server, checkpoint)


def is_right(text: str, number: int) -> bool:
    """Return whether an answer's last line is ``#### number``."""
    return text.strip().splitlines()[-1:] == [f"#### {number}"]


_accuracy: dict[str, float] = {}


def hf_accuracy(checkpoint: str) -> float:
    """Return transformers' own greedy accuracy on the 200 problems, fp32."""
    if checkpoint not in _accuracy:
        tokenizer = oracle.tokenizer(checkpoint)
        right = 0
        for first in range(0, COUNT, 50):
            asked = checks.prompts(checkpoint, COUNT)[first : first + 50]
            width = max(map(len, asked))
            ids = torch.tensor([[0] * (width - len(one)) + list(one) for one in asked])
            mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in asked])
            out = oracle.model(checkpoint).generate(
                ids, attention_mask=mask, max_new_tokens=96, do_sample=False, pad_token_id=0
            )
            texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
            problems = oracle.problems(COUNT)[first : first + 50]
            right += sum(is_right(text, problem["number"]) for text, problem in zip(texts, problems, strict=True))
        _accuracy[checkpoint] = right / COUNT
    return _accuracy[checkpoint]
