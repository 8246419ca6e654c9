"""SGLang's own DeepSeek class on our backend, on a CPU: the fp32 logprobs of transformers' DeepseekV3ForCausalLM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import FP32_MAX, differences
from server import serve
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from atom_plugin import host

LENGTHS = (6, 63, 64, 65, 130)
FLAGS = ("--attention-backend", "atom", "--dtype", "float32", "--skip-tokenizer-init", "--chunked-prefill-size", "64")
#: What SGLang's class asks of a config and transformers 5 leaves out; the model_type keeps its config class away.
PUBLISHED = {"model_type": "kimi_k2", "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@dataclass(frozen=True)
class Tiny:
    """A checkpoint with random weights, large enough that its tokens depend on every key, and transformers' model."""

    folder: Path
    model: Any

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> list[float]:
        """Return, teacher-forced, the logprob of each token but the first."""
        logits = self.model(torch.tensor([ids])).logits[0, :-1].float()
        picked: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return picked


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=8, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        q_lora_rank=48, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        rope_scaling={**YARN, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}, rope_theta=1e4, max_position_embeddings=2048,
        num_nextn_predict_layers=0, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **PUBLISHED}))
    return Tiny(folder, model)


@pytest.mark.parametrize("page_size", [1, 64])
def test_sglangs_class_serves_the_logprobs_of_transformers(tiny: Tiny, page_size: int, tmp_path: Path) -> None:
    """Prompts whole and in chunks of 64, decodes, and extends of a cached prefix."""
    if page_size > 1 and not host.since("0.5.23"):
        return  # their allocator of pages is a Triton kernel, on our platform too
    torch.manual_seed(1)
    prompts = [torch.randint(0, 512, (length,)).tolist() for length in LENGTHS]
    with serve(tiny.folder, *FLAGS, "--page-size", str(page_size), folder=tmp_path) as server:
        prefill = server.logprobs(prompts)
        assert differences(prefill, [tiny.logprobs(ids) for ids in prompts]).max < FP32_MAX / 10
        for cached in (False, True):
            longer = [[*ids, 7, 8, 9] for ids in prompts] if cached else prompts
            sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            answers = server.generate(input_ids=longer, sampling_params=sampling, return_logprob=True)
            if cached:
                assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 100
            got = [[value for value, *_ in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
            want = [
                tiny.logprobs(ids + answer["output_ids"])[-len(answer["output_ids"]) :]
                for ids, answer in zip(longer, answers, strict=True)
            ]
            assert differences(got, want).max < FP32_MAX / 10
    log = (tmp_path / "server.log").read_text()
    assert "The attention backend atom on cpu: mla_attention=eager, store_kv=eager" in log
    assert "The attention backend atom on cpu: paged_attention=eager" in log
