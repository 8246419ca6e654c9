"""Bad launches stop before weights load, each with one message: what was asked, what is there, the way out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from server import environment, refuse

ATOM = ["--model-impl", "atom"]
FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf_configs"
INDEX = "model.safetensors.index.json"
ATTENTION = "model.layers.1.self_attn.q_proj.weight"


def with_config(**changes: Any) -> Callable[[Path], None]:
    """Return a change to config.json; a value of None takes the field out."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))

    return change


def with_tensors(edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Return a change to the tensors of model.safetensors."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def truncate(folder: Path) -> None:
    """Cut the last kilobyte off the weights."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1024])


def name_a_second_file(folder: Path) -> None:
    """Add an index that names a file which is not there."""
    (folder / INDEX).write_text(json.dumps({"weight_map": {ATTENTION: "model-00002.safetensors"}}))


def with_draft(*architectures: str) -> Callable[[Path], None]:
    """Return what puts the config of a draft model of these names into the folder's subfolder ``draft``."""

    def change(folder: Path) -> None:
        (folder / "draft").mkdir()
        config = {
            "architectures": list(architectures),
            "model_type": "llama",
            "hidden_size": 128,
            "num_hidden_layers": 1,
        }
        (folder / "draft" / "config.json").write_text(json.dumps(config))

    return change


def kimi_with_draft(folder: Path) -> None:
    """Put a Kimi-K2 into the folder, and a draft."""
    shutil.copytree(oracle.CHECKPOINTS["kimi"], folder, dirs_exist_ok=True)
    with_draft("LlamaForCausalLMEagle")(folder)


def misspell(folder: Path) -> None:
    """Write num_experts_per_tokk, as a person would."""
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"num_experts_per_tok"', '"num_experts_per_tokk"'))


def become(name: str) -> Callable[[Path], None]:
    """Return a change that puts a published config in place of ours."""
    return lambda folder: shutil.copyfile(FIXTURES / f"{name}.json", folder / "config.json")


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}

EAGLE = [
    "--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "{folder}/draft",
    "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4",
]  # fmt: skip
CHAIN = ["--speculative-eagle-topk", "1"]
ON_TRITON = ["--speculative-draft-attention-backend", "triton"]
#: What every launch that speculates is told here, next to what else is wrong with it.
NOT_ON_A_CPU = "speculation on a CPU: SGLang's kernels that verify a draft are not there"

#: name -> (change to the tiny checkpoint, further flags, words that the message must hold)
CASES: dict[str, tuple[Callable[[Path], None] | None, list[str], list[str]]] = {
    "unknown architecture": (
        with_config(architectures=["LlamaForCausalLM"], model_type="llama"),
        [],
        ["LlamaForCausalLM", "model_type 'llama'", "It has: Qwen3ForCausalLM", "Drop `--model-impl atom`"],
    ),
    "DeepSeek-V3": (
        become("deepseek-ai--DeepSeek-V3"),
        [],
        ["DeepseekV3ForCausalLM with model_type 'deepseek_v3'", "Drop `--model-impl atom`"],
    ),
    "architecture of ours, model_type of another": (
        with_config(model_type="qwen3"),
        [],
        ["Qwen3MoeForCausalLM with model_type 'qwen3'", "Qwen3MoeForCausalLM (model_type qwen3_moe)"],
    ),
    "Kimi-K2 in FP8 on a CPU, of files in bf16": (
        become("moonshotai--Kimi-K2-Instruct"),
        [],
        [
            "the checkpoint is block FP8, and SGLang's MoE and linear layers read no scales on a CPU",
            "tensors stored as BF16: model.layers.0.self_attn.o_proj.weight, model.layers.1.",
            "accepted: torch.float8_e4m3fn",
        ],
    ),
    "Kimi-K2-Thinking on a CPU": (
        become("moonshotai--Kimi-K2-Thinking"),
        ["--load-format", "dummy"],
        ["the checkpoint is INT4, and SGLang's MoE and linear layers read no scales on a CPU"],
    ),
    "Kimi-K2 over ranks that its heads and FP8 blocks do not fit": (
        become("moonshotai--Kimi-K2-Instruct"),
        ["--load-format", "dummy", "--tp-size", "6"],
        [
            "attention TP 6 does not divide 64 heads",
            "moe_intermediate_size 2048 is not divisible by 6 ranks into whole FP8 blocks of 128; a larger --ep-size",
        ],
    ),
    "Kimi-K2 that transformers 5 has saved": (
        become("moonshotai--Kimi-K2-Instruct.v5"),
        [],
        ["with model_type 'deepseek_v3'", """--json-model-override-args '{"model_type": "kimi_k2"}'"""],
    ),
    "the same with the override": (
        become("moonshotai--Kimi-K2-Instruct.v5"),
        ["--json-model-override-args", '{"model_type": "kimi_k2"}', "--load-format", "dummy"],
        ["the checkpoint is block FP8, and SGLang's MoE and linear layers read no scales on a CPU"],
    ),
    "rope of another kind": (
        with_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, rope_theta=None),
        [],
        ["rope type 'dynamic' is not served", "Served: default, linear, llama3, yarn"],
    ),
    "missing tensor": (
        with_tensors(lambda tensors: tensors.pop(ATTENTION)),
        [],
        ["1 missing tensors", ATTENTION],
    ),
    "extra tensor": (
        with_tensors(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(256)})),
        [],
        ["1 tensors that the model has no place for: model.layers.0.self_attn.q_proj.bias"],
    ),
    "wrong shape": (
        with_tensors(lambda tensors: tensors.update({ATTENTION: torch.zeros(128, 128, dtype=torch.bfloat16)})),
        [],
        [f"1 wrong shapes: {ATTENTION} is [128, 128], the config says [256, 128]"],
    ),
    "truncated file": (truncate, [], ["model.safetensors cannot be read", "truncated or damaged; fetch it again"]),
    "index names a missing file": (name_a_second_file, [], ["model-00002.safetensors is missing", INDEX]),
    "unsupported quantisation": (
        with_config(quantization_config=AWQ),
        [],
        ["config.json: field 'quantization_config'", "awq", "weight_block_size [128, 128]", "drop `--model-impl atom`"],
    ),
    "block FP8 on a CPU": (
        with_config(quantization_config=FP8),
        [],
        ["block FP8", "read no scales on a CPU", "serve it on a GPU"],
    ),
    "misspelled field": (misspell, [], ["'num_experts_per_tok' is absent", "is 'num_experts_per_tokk' a misspelling"]),
    "misspelled optional field": (
        with_config(attention_bias=None, atention_bias=False),
        [],
        ["field 'atention_bias'", "did you mean 'attention_bias'"],
    ),
    "contradiction": (
        with_config(num_experts=16, num_local_experts=8),
        [],
        ["'num_experts'", "contradicts 'num_local_experts' = 8"],
    ),
    "sliding window": (
        with_config(use_sliding_window=True, sliding_window=128),
        [],
        ["'use_sliding_window' is True", "accepted: None, False"],
    ),
    "speculation": (
        None,
        ["--speculative-algorithm", "NGRAM"],
        ["--speculative-algorithm NGRAM", "serves only None or EAGLE or EAGLE3"],
    ),
    "speculation on a CPU": (with_draft("LlamaForCausalLMEagle"), [*EAGLE, *CHAIN, *ON_TRITON], [NOT_ON_A_CPU]),
    "a tree of drafts": (
        with_draft("LlamaForCausalLMEagle"),
        [*EAGLE, "--speculative-eagle-topk", "2", *ON_TRITON],
        ["--speculative-eagle-topk 2: the atom model and backend serves only 1 (a tree of drafts needs a mask)"],
    ),
    "rejection sampling": (
        with_draft("LlamaForCausalLMEagle"),
        [*EAGLE, *CHAIN, *ON_TRITON, "--speculative-use-rejection-sampling"],
        ["--speculative-use-rejection-sampling True: the atom model and backend serves only False"],
    ),
    "no draft": (
        None,
        [*EAGLE[:2], *EAGLE[4:], *CHAIN, *ON_TRITON],
        ["--speculative-draft-model-path is not given: a draft of architecture LlamaForCausalLMEagle is required"],
    ),
    "a draft of two names": (
        with_draft("LlamaForCausalLMEagle", "LlamaForCausalLM"),
        [*EAGLE, *CHAIN, *ON_TRITON],
        ["draft/config.json: 'architectures' is ['LlamaForCausalLMEagle', 'LlamaForCausalLM']: the name of one draft"],
    ),
    "a draft of the other algorithm": (
        with_draft("LlamaForCausalLMEagle3"),
        [*EAGLE, *CHAIN, *ON_TRITON],
        ["its architecture is LlamaForCausalLMEagle3", "EAGLE is tested with LlamaForCausalLMEagle alone"],
    ),
    "drafts on atom without a word": (
        with_draft("LlamaForCausalLMEagle"),
        [*EAGLE, *CHAIN],
        ["verifies drafts and does not run them", "add --speculative-draft-attention-backend triton, or another"],
    ),
    "drafts on atom by name": (
        with_draft("LlamaForCausalLMEagle"),
        [*EAGLE, *CHAIN, "--speculative-draft-attention-backend", "atom"],
        ["--speculative-draft-attention-backend atom: the atom attention backend does not run drafts; give"],
    ),
    "speculation on two backends": (
        with_draft("LlamaForCausalLMEagle"),
        [*EAGLE, *CHAIN, *ON_TRITON, "--prefill-attention-backend", "atom", "--decode-attention-backend", "triton"],
        ["--prefill-attention-backend atom and --decode-attention-backend triton", "give one --attention-backend"],
    ),
    "speculation with attention DP": (
        with_draft("LlamaForCausalLMEagle"),
        [*EAGLE, *CHAIN, *ON_TRITON, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
        ["speculation with data-parallel attention is not tested"],
    ),
    "speculation of Kimi-K2": (
        kimi_with_draft,
        [*EAGLE, *CHAIN, *ON_TRITON],
        ["speculation over a latent (MLA) cache is not tested"],
    ),
    "pipeline": (None, ["--pp-size", "2"], ["--pp-size 2: the atom model serves only 1"]),
    "a2a": (None, ["--moe-a2a-backend", "deepep", "--tp-size", "2"], ["--moe-a2a-backend deepep"]),
    "speculation on another backend": (
        None,
        ["--attention-backend", "torch_native", "--speculative-algorithm", "NGRAM"],
        ["--speculative-algorithm NGRAM: the atom model serves only None"],
    ),
    "disaggregation on another backend": (
        None,
        ["--attention-backend", "torch_native", "--disaggregation-mode", "prefill"],
        ["--disaggregation-mode prefill: the atom model serves only null"],
    ),
    "other load formats": (None, ["--load-format", "sharded_state"], ["--load-format sharded_state"]),
    "field of another model": (
        with_config(final_logit_softcapping=30.0),
        [],
        ["'final_logit_softcapping' is 30.0", "our model does not compute this"],
    ),
    "LoRA": (
        None,
        ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"],
        ["--enable-lora True"],
    ),
    "online quantisation": (None, ["--quantization", "fp8"], ["--quantization fp8: the checkpoint is not quantised"]),
    "TP that divides nothing": (
        None,
        ["--tp-size", "3"],
        ["attention TP 3 does not divide 4 query heads and 2 KV heads"],
    ),
    "e5m2": (None, ["--kv-cache-dtype", "fp8_e5m2"], ["--kv-cache-dtype fp8_e5m2: use one of auto"]),
    "odd page": (None, ["--page-size", "48"], ["--page-size 48: use a power of two"]),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Check every case in one process and return the outcomes."""
    base = tmp_path_factory.mktemp("refusals")
    cases = []
    for name, (change, flags, _) in {**CASES, "nothing wrong": (None, [], [])}.items():
        folder = base / name.replace(" ", "-")
        shutil.copytree(oracle.CHECKPOINTS["moe"], folder)
        if change is not None:
            change(folder)
        flags = [flag.format(folder=folder) if "{folder}" in flag else flag for flag in flags]
        cases.append([name, ["--model-path", str(folder), *ATOM, *flags]])
    (base / "site").mkdir()
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("refusal_runner.py")],
        input=json.dumps(cases),
        env=environment(base, {}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "OUTCOMES" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(ran.stdout.rsplit("OUTCOMES", 1)[1])


@pytest.mark.parametrize("name", CASES)
def test_refused(outcomes: dict[str, str], name: str) -> None:
    """One message with the facts, the flags that were asked, and the way out."""
    message = outcomes[name]
    assert message.startswith("atom-plugin cannot serve this launch (--model-impl atom"), message
    for words in CASES[name][2]:
        assert words in message, message
    assert "Nothing was loaded." in message


@pytest.mark.parametrize("name", [name for name in CASES if "--speculative-draft-model-path" in CASES[name][1]])
def test_a_launch_that_speculates_is_refused_for_what_it_says(outcomes: dict[str, str], name: str) -> None:
    """The same launch with that one thing right would be told about the CPU alone."""
    reasons = [line for line in outcomes[name].splitlines() if line.startswith("  - ")]
    assert any(NOT_ON_A_CPU in reason for reason in reasons)
    also_for_tp = name == "speculation with attention DP"
    assert len(reasons) == (1 if name == "speculation on a CPU" else 2 + also_for_tp), reasons


def test_nothing_wrong_is_served(outcomes: dict[str, str]) -> None:
    """The same checks let a good launch through."""
    assert outcomes["nothing wrong"] == "served"


def test_server_never_comes_up(tmp_path: Path) -> None:
    """A refused launch of a real server ends with the message and without a traceback, before any weight."""
    folder = tmp_path / "model"
    shutil.copytree(oracle.CHECKPOINTS["moe"], folder)
    truncate(folder)
    printed = refuse(folder, *ATOM, folder=tmp_path / "run")
    assert "truncated or damaged; fetch it again" in printed
    assert "Traceback" not in printed
    assert "Load weight begin" not in printed


def test_forced_kernel_that_cannot_run(tmp_path: Path) -> None:
    """A row forced by a name that does not exist ends the launch before weights load, naming the rows that do."""
    env = {"ATOM_PLUGIN_KERNELS": "paged_attention=unified_attention"}
    printed = refuse(oracle.CHECKPOINTS["moe"], *ATOM, folder=tmp_path, env=env)
    assert "unified_attention" in printed and "eager" in printed and "reference" in printed
    assert "Traceback" not in printed and "Load weight begin" not in printed


def test_the_name_in_other_letters(tmp_path: Path) -> None:
    """`--model-impl ATOM` would be SGLang's own model."""
    printed = refuse(oracle.CHECKPOINTS["moe"], "--model-impl", "ATOM", folder=tmp_path)
    assert "--model-impl ATOM: SGLang would take it for a name of its own; write atom" in printed
