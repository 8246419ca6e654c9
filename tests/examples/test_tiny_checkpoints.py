"""Contract: the committed checkpoints keep their sizes and shapes, and their tokenizers lose nothing."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import train_tiny
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from word_problems import training_problem

EXAMPLES = Path(train_tiny.__file__).parent
MAX_BYTES = {"tiny-qwen3-moe": 12_000_000, "tiny-qwen3": 6_000_000}
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
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
        assert ("lm_head.weight" in tensors.keys()) == (folder.name == "tiny-qwen3-moe")  # noqa: SIM118


def test_config_keeps_what_the_tests_of_serving_rely_on(config: dict[str, Any]) -> None:
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 8192
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["tie_word_embeddings"] == (config["model_type"] == "qwen3")
    if config["model_type"] == "qwen3_moe":
        assert config["num_experts"] >= 8
        assert config["num_experts_per_tok"] == 2
        assert config["norm_topk_prob"] is True
        assert config["moe_intermediate_size"] % 8 == 0


def test_config_is_the_one_the_script_trains(folder: Path, config: dict[str, Any]) -> None:
    wanted = train_tiny.MOE_CONFIG if config["model_type"] == "qwen3_moe" else train_tiny.DENSE_CONFIG
    assert {name: config[name] for name in wanted} == wanted
    assert AutoConfig.from_pretrained(folder).head_dim == wanted["head_dim"]


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
