"""Kimi-K2 served: transformers' logprobs and answers in fp32, from our model and from SGLang's on our backend."""

from __future__ import annotations

from collections.abc import Iterator

import checks
import oracle
import pytest
from server import Server, serve
from test_corners import COUNT, hf_accuracy, is_right

CHECKPOINT = oracle.CHECKPOINTS["kimi"]
OURS = "atom_plugin.models.kimi_k2.KimiK2ForCausalLM"
BACKEND = "atom_plugin.attention.backend.AtomAttentionBackend"
ATOM = ("--model-impl", "atom", "--dtype", "float32")
CORNERS = {
    "atom": (ATOM, OURS),
    "sglang": (
        ("--attention-backend", "atom", "--dtype", "float32"),
        "sglang.srt.models.deepseek_v2.DeepseekV3ForCausalLM",
    ),
}


@pytest.fixture(scope="module", params=CORNERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve one model on our backend."""
    flags, model = CORNERS[request.param]
    with serve(CHECKPOINT, *flags, folder=tmp_path_factory.mktemp("kimi")) as running:
        (rank,) = running.ranks()
        assert (rank["model"], rank["backends"]) == (model, [BACKEND])
        yield running


def test_logprobs(server: Server) -> None:
    """Prefill cold and warm, long prompts, cached prefixes of any length, decode, and 16 clients at once."""
    checks.assert_serves_as_transformers(server, "kimi")
    checks.assert_serves_many_at_once(server, "kimi")


def test_greedy_answers(server: Server) -> None:
    """200 greedy answers: accuracy within 1 point of transformers'."""
    answers = checks.decode(server, checks.prompts("kimi", COUNT), 96)
    outputs = [[entry[1] for entry in one["meta_info"]["output_token_logprobs"]] for one in answers]
    texts = [oracle.tokenizer("kimi").decode(ids, skip_special_tokens=True) for ids in outputs]
    right = [is_right(text, problem["number"]) for text, problem in zip(texts, oracle.problems(COUNT), strict=True)]
    ours, theirs = sum(right) / COUNT, hf_accuracy("kimi")
    print(f"accuracy {ours:.3f}, transformers {theirs:.3f}")
    assert abs(ours - theirs) <= 0.01
    assert theirs > 0.7, "a checkpoint that cannot answer proves nothing"
