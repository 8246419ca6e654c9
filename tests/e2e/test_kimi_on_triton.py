"""Kimi-K2 on SGLang's own Triton attention, interpreted: transformers' logprobs in fp32, from our model and SGLang's.

SGLang's MLA decode kernel takes latents of 512 and 64 columns or 256 and 32: with those of examples/tiny-kimi-k2 its
blocks do not fit. So this is a random model of two layers whose heads have the published sizes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import checks
import oracle
import pytest
import torch
from server import Server, serve
from transformers import DeepseekV3ForCausalLM

from tests.models import tiny_kimi

NAME = "random-kimi"
HEAD_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
FLAGS = ("--attention-backend", "triton", "--dtype", "float32", "--skip-tokenizer-init")
BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
CORNERS = {
    "atom": (("--model-impl", "atom"), "atom_plugin.models.kimi_k2.KimiK2ForCausalLM"),
    "sglang": ((), "sglang.srt.models.deepseek_v2.DeepseekV3ForCausalLM"),
}
#: A prefill block has 32 queries and 32 keys, and a program of a decode step reads 32 keys or more: all are crossed.
LENGTHS = (71, 33, 9)
PREFIX = 41


def sequences() -> checks.Sequences:
    """Return random token ids of ``LENGTHS``."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = tiny_kimi.TINY["vocab_size"]
    return tuple(tuple(torch.randint(1, vocabulary, (num,), generator=generator).tolist()) for num in LENGTHS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the random model, and make it known to the oracle."""
    pytest.importorskip("triton", reason="Triton is not installed, so no server ran on SGLang's kernels")
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_kimi.make_oracle(tiny_kimi.make_config(num_hidden_layers=2, **HEAD_SIZES)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(oracle.CHECKPOINTS, NAME, folder)
        yield folder


@pytest.fixture(scope="module", params=CORNERS)
def server(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Serve one model; on a CPU a Triton kernel that is not interpreted cannot run."""
    flags, model = CORNERS[request.param]
    how = {"env": {"TRITON_INTERPRET": "1"}, "max_total_tokens": 512}
    with serve(checkpoint, *FLAGS, *flags, folder=tmp_path_factory.mktemp("server"), **how) as running:
        (rank,) = running.ranks()
        assert (rank["model"], rank["backends"]) == (model, [BACKEND])
        yield running


@pytest.mark.slow
def test_logprobs(server: Server) -> None:
    """New prompts, the rest of one after a cached prefix (absorbed: too few queries to expand it), and decode."""
    checks.assert_fp32(checks.prefill_differences(server, NAME, sequences()), "prefill")
    longest = sequences()[0]
    answer = server.generate(
        input_ids=list(longest),
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=PREFIX,
    )
    assert answer["meta_info"]["cached_tokens"] == PREFIX
    got = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][1:]
    expected = checks.want(NAME, sequences())[0][PREFIX:]
    checks.assert_fp32(checks.differences([got], [expected]), "after a cached prefix")
    checks.assert_fp32(checks.decode_differences(server, NAME, sequences(), 4), "decode")


def without_rotated_keys(model: DeepseekV3ForCausalLM) -> None:
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight.data[HEAD_SIZES["kv_lora_rank"] :] = 0


def without_mscale(model: DeepseekV3ForCausalLM) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = (HEAD_SIZES["qk_nope_head_dim"] + HEAD_SIZES["qk_rope_head_dim"]) ** -0.5


@pytest.mark.parametrize("fault", [without_rotated_keys, without_mscale])
@torch.no_grad()
def test_a_fault_in_attention_would_show(checkpoint: Path, fault: Callable[[DeepseekV3ForCausalLM], None]) -> None:
    """Transformers' model with the fault is as far from the one without as a server with it would be."""
    faulty = copy.deepcopy(oracle.model(NAME))
    fault(faulty)
    for ids in sequences():
        got = faulty(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        found = checks.differences([got.tolist()], checks.want(NAME, (ids,)))
        assert found.quantile(0.5) > 100 * checks.FP32_P999, str(found)
