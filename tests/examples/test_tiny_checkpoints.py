"""Contract: the committed checkpoints keep their sizes and shapes, and their tokenizers lose nothing."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import train_tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from word_problems import training_problem

EXAMPLES = Path(train_tiny.__file__).parent
MAX_BYTES = {"tiny-qwen3-moe": 12_000_000, "tiny-qwen3": 6_000_000, "tiny-kimi-k2": 12_000_000}
TEXTS = ["", " ", "\n\n", "\t\r\n", "12 + 30 = 42", "naïve café", "日本語とかな", "🙂👩‍👩‍👧", "\x00\x01\x7f", "a" * 300]


@pytest.fixture(params=MAX_BYTES)
def folder(request: pytest.FixtureRequest) -> Path:
    return EXAMPLES / request.param


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_weights_are_bf16_and_small(folder: Path) -> None:
    weights = folder / "model.safetensors"
    assert weights.stat().st_size <= MAX_BYTES[folder.name]
    with safe_open(weights, "pt") as tensors:
        dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    assert set(dtypes.values()) <= {"BF16", "F32"}
    in_fp32 = {name for name, dtype in dtypes.items() if dtype == "F32"}
    biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    assert in_fp32 == (biases if folder.name == "tiny-kimi-k2" else set())
    assert ("lm_head.weight" in dtypes) == (folder.name != "tiny-qwen3")


def test_config_keeps_what_the_tests_of_serving_rely_on(config: dict[str, Any]) -> None:
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 8192
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["tie_word_embeddings"] == (config["model_type"] == "qwen3")
    if config["model_type"] == "kimi_k2":
        assert config["architectures"] == ["DeepseekV3ForCausalLM"]
        assert config["rope_parameters"]["original_max_position_embeddings"] < train_tiny.ROW_TOKENS
        assert config["routed_scaling_factor"] != 1 and config["n_shared_experts"] == 1
        return
    assert config["rope_theta"] == 1e6
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    if config["model_type"] == "qwen3_moe":
        assert config["num_experts"] >= 8
        assert config["num_experts_per_tok"] == 2
        assert config["norm_topk_prob"] is True
        assert config["moe_intermediate_size"] % 8 == 0


def test_config_is_the_one_the_script_trains(folder: Path, config: dict[str, Any]) -> None:
    name = {"qwen3_moe": "qwen3-moe", "qwen3": "qwen3", "kimi_k2": "kimi-k2"}[config["model_type"]]
    _, config_class, wanted = tiny_models.MODELS[name]
    assert {name: config[name] for name in wanted} == wanted
    assert config_class.from_pretrained(folder).head_dim == config["head_dim"]


def test_a_router_of_the_tiny_kimi_chooses_by_its_bias() -> None:
    """Trained, small and not nothing: leaving it out changes choices."""
    model = tiny_models.load(EXAMPLES / "tiny-kimi-k2", torch.float32, "cpu")
    for moe in tiny_models.biased_experts(model):
        assert 0.01 < moe.gate.e_score_correction_bias.abs().max() < 1


def test_a_checkpoint_that_is_not_loaded_whole_is_refused(tmp_path: Path) -> None:
    """Transformers warns and goes on with what it initialised."""
    shutil.copytree(EXAMPLES / "tiny-kimi-k2", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError)):
        tiny_models.load(tmp_path, torch.float32, "cpu")


def test_the_bias_of_an_expert_that_had_too_few_goes_up() -> None:
    """And that of one that had too many down."""
    model = tiny_models.build_model("kimi-k2", seed=0)
    move = train_tiny.balance_experts(model)
    (moe, *_) = tiny_models.biased_experts(model)
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1]])
    moe.experts(torch.zeros(3, 192, dtype=torch.bfloat16), chosen, torch.ones(3, 2, dtype=torch.bfloat16))
    move(0.5)
    assert moe.gate.e_score_correction_bias.tolist() == [-0.5, -0.5, -0.5, *[0.5] * 5]


def test_tokenizer_fits_the_model_and_has_no_unknown_token(tokenizer: PreTrainedTokenizerFast, config: dict) -> None:
    assert tokenizer.unk_token is None
    assert len(tokenizer) <= config["vocab_size"]
    assert tokenizer.eos_token_id == config["eos_token_id"]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer_round_trip_of_random_unicode(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(3)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    for _ in range(200):
        text = "".join(map(chr, rng.choices(points, k=30)))
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_byte_has_a_token(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert set(train_tiny.pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary)


def test_tokens_of_joined_problems_are_the_joined_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [train_tiny.text_of(training_problem(5, index)) for index in range(6)]
    gap = tokenizer("\n\n").input_ids
    joined = list(tokenizer(texts[0]).input_ids)
    for text in texts[1:]:
        joined += [*gap, *tokenizer(text).input_ids]
    assert tokenizer("\n\n".join(texts)).input_ids == joined


def test_prompt_and_answer_tokenize_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    problem = training_problem(5, 0)
    parts = tokenizer(problem.prompt).input_ids + tokenizer(" " + problem.answer).input_ids
    assert tokenizer(train_tiny.text_of(problem)).input_ids == parts
