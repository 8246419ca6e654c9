"""Trains and judges the tiny Qwen3-MoE, Qwen3 and Kimi-K2 checkpoints on generated word problems.

python examples/train_tiny.py train --out DIR                  # Qwen3's mixture of experts
python examples/train_tiny.py train --out DIR --model qwen3    # its dense twin
python examples/train_tiny.py train --out DIR --model kimi-k2  # latent attention, sigmoid-routed and shared experts
python examples/train_tiny.py judge DIR

The models are transformers' own classes, so transformers is the exact reference for whoever serves them. Training
keeps fp32 master weights and computes in the bf16 weights that are saved. The judge decodes the 500 held-out
problems greedily, and takes attention apart to show that the score depends on it.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tiny_models import EOS_ID, MAX_POSITIONS, MODELS, PAD_ID, VOCAB_SIZE, biased_experts, build_model, load
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoTokenizer,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe
from word_problems import TRAINING_SEED, Problem, heldout_problems, training_problem

EOS, PAD = "<|endoftext|>", "<|pad|>"
NUM_TRAINING_PROBLEMS = 400_000
ROW_TOKENS = 1024
ROWS_PER_STEP = 48
NUM_STEPS = 5_000
PEAK_LEARNING_RATE = 2e-3
PEAK_BIAS_STEP = 1e-3
WARMUP_STEPS = 300
NO_LOSS = -100
FEWSHOT_SEED = 2
NUM_SHOTS = 5


def text_of(problem: Problem) -> str:
    """A whole problem as training sees it, without the end token."""
    return f"{problem.prompt} {problem.answer}"


# Tokenizer and training rows.


def train_tokenizer(out: Path) -> None:
    """Writes a byte-level BPE tokenizer without an unknown token; digits and newlines are tokens of their own.

    That isolation makes the tokens of a text those of its problems joined, so packed rows match few-shot prompts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n|[0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (text_of(training_problem(TRAINING_SEED, index)) for index in range(20_000))
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "padding_side": "left",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode_range(tokenizer_file: str, indices: range) -> list[tuple[int, np.ndarray]]:
    """(prompt length, tokens) of training problems; runs in a worker process."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    encoded = []
    for index in indices:
        problem = training_problem(TRAINING_SEED, index)
        prompt_length = len(tokenizer.encode(problem.prompt).ids)
        encoded.append((prompt_length, np.array(tokenizer.encode(text_of(problem)).ids, dtype=np.int16)))
    return encoded


def encode_problems(tokenizer_file: Path, num_problems: int) -> list[tuple[int, np.ndarray]]:
    """All training problems in order, encoded on every core."""
    chunks = [range(start, min(start + 5_000, num_problems)) for start in range(0, num_problems, 5_000)]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        return [
            row for part in pool.map(partial(encode_range, str(tokenizer_file)), chunks, chunksize=1) for row in part
        ]


def pack_rows(encoded: list[tuple[int, np.ndarray]], newline_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [rows, ROW_TOKENS] int16 each, several problems a row, loss on the answers alone.

    Every other row joins its problems by the end token, the rest by an empty line as few-shot prompts do. The label
    after an answer is the end token in both, so the model stops whatever joined the examples before.
    """
    separators = (np.array([EOS_ID], np.int16), np.array([newline_id, newline_id], np.int16))
    token_rows, label_rows, used = [], [], ROW_TOKENS
    for prompt_length, ids in encoded:
        if used + len(ids) + 2 > ROW_TOKENS:
            token_rows.append(np.full(ROW_TOKENS, PAD_ID, np.int16))
            label_rows.append(np.full(ROW_TOKENS, NO_LOSS, np.int16))
            used = 0
        tokens, labels = token_rows[-1], label_rows[-1]
        separator = separators[len(token_rows) % 2]
        end = used + len(ids)
        tokens[used:end] = ids
        labels[used + prompt_length : end] = ids[prompt_length:]
        tokens[end : end + len(separator)] = separator
        labels[end] = EOS_ID
        used = end + len(separator)
    return torch.from_numpy(np.stack(token_rows)), torch.from_numpy(np.stack(label_rows))


# Training.


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.01 + 0.99 * 0.5 * (1 + float(np.cos(np.pi * progress))))


def balance_experts(model: PreTrainedModel) -> Callable[[float], None]:
    """Returns a function that moves each correction bias by a step after a batch: up where an expert had too few.

    The balancing without a loss of https://arxiv.org/abs/2408.15664.
    """
    chosen: dict[nn.Module, torch.Tensor] = {}

    def remember(moe: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        chosen[moe] = args[1]

    for moe in biased_experts(model):
        moe.experts.register_forward_pre_hook(lambda experts, args, moe=moe: remember(moe, args))

    def move(step: float) -> None:
        for moe, experts in chosen.items():
            bias = moe.gate.e_score_correction_bias
            load = torch.bincount(experts.flatten(), minlength=len(bias)).float()
            bias += step * torch.sign(load.mean() - load)

    return move


def fit(model: PreTrainedModel, tokens: torch.Tensor, labels: torch.Tensor, num_steps: int) -> None:
    """Trains the bf16 `model` in place; AdamW works on fp32 masters that are rounded into it after each step."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    decayed, plain = [m for m in masters if m.dim() > 1], [m for m in masters if m.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    extras = {"output_router_logits": True} if isinstance(model, Qwen3MoeForCausalLM) else {}
    move_biases = balance_experts(model)
    generator = torch.Generator().manual_seed(TRAINING_SEED)
    order = torch.empty(0, dtype=torch.long)
    started = time.perf_counter()
    model.train()
    for step in range(num_steps):
        if len(order) < ROWS_PER_STEP:
            order = torch.cat([order, torch.randperm(len(tokens), generator=generator)])
        picked, order = order[:ROWS_PER_STEP].to(tokens.device), order[ROWS_PER_STEP:]
        loss = model(input_ids=tokens[picked].long(), labels=labels[picked].long(), use_cache=False, **extras).loss
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        optimizer.step()
        move_biases(PEAK_BIAS_STEP * learning_rate(step, num_steps) / PEAK_LEARNING_RATE)
        torch._foreach_copy_([weight.data for weight in weights], [master.data for master in masters])
        if step % 250 == 0 or step == num_steps - 1:
            print(f"step {step} loss {loss.item():.4f} seconds {time.perf_counter() - started:.1f}", flush=True)


def save(model: PreTrainedModel, out: Path) -> None:
    """Writes weights and configs; `config.json` also has rope_theta and num_experts where transformers 4 reads them.

    A Kimi-K2 is told from a DeepSeek-V3 by its model_type alone.
    """
    model.save_pretrained(out)
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    config_file = out / "config.json"
    config = json.loads(config_file.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    if isinstance(model, DeepseekV3ForCausalLM):
        config["model_type"] = "kimi_k2"
    elif "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def train(out: Path, *, name: str, num_steps: int, num_problems: int, device: str) -> None:
    """Tokenizer, data, training and checkpoint, with the seconds of each part printed."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    train_tokenizer(out)
    newline_id = Tokenizer.from_file(str(out / "tokenizer.json")).encode("\n").ids[0]
    tokens, labels = pack_rows(encode_problems(out / "tokenizer.json", num_problems), newline_id)
    prepared = time.perf_counter()
    print(f"{num_problems} problems in {len(tokens)} rows, seconds {prepared - started:.1f}", flush=True)
    model = build_model(name, seed=TRAINING_SEED).to(device)
    fit(model, tokens.to(device), labels.to(device), num_steps)
    save(model, out)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters} parameters, {num_steps} steps, training seconds {time.perf_counter() - prepared:.1f}")


# Judging.


@contextmanager
def attention_zeroed(model: PreTrainedModel, layer: int) -> Iterator[None]:
    """Within, the attention block of `layer` adds nothing to the residual stream."""
    attention = model.model.layers[layer].self_attn
    hook = attention.register_forward_hook(lambda module, args, output: (torch.zeros_like(output[0]), *output[1:]))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def queries_shifted(model: PreTrainedModel) -> Iterator[None]:
    """Within, each query is rotated one position further than it stands, the keys as they should be."""
    rotations = (
        (modeling_qwen3, "apply_rotary_pos_emb"),
        (modeling_qwen3_moe, "apply_rotary_pos_emb"),
        (modeling_deepseek_v3, "apply_rotary_pos_emb_interleave"),
    )
    originals = [getattr(module, name) for module, name in rotations]
    step = model.model.rotary_emb.inv_freq.repeat(2)

    def shifted(original, query, key, cos, sin):
        further = cos * step.cos() - sin * step.sin(), sin * step.cos() + cos * step.sin()
        shifted_query, _ = original(query, query, *(part.to(cos.dtype) for part in further))
        return shifted_query, original(query, key, cos, sin)[1]

    for (module, name), original in zip(rotations, originals, strict=True):
        setattr(module, name, partial(shifted, original))
    try:
        yield
    finally:
        for (module, name), original in zip(rotations, originals, strict=True):
            setattr(module, name, original)


@torch.no_grad()
def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """Greedy completions, decoded in batches of 250 prompts padded on the left."""
    completions = []
    for start in range(0, len(prompts), 250):
        batch = tokenizer(prompts[start : start + 250], return_tensors="pt", padding=True, padding_side="left")
        batch = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        output = model.generate(**batch, max_new_tokens=128, do_sample=False)
        completions += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return completions


def exact_matches(problems: list[Problem], completions: list[str]) -> list[bool]:
    """Whether the first `#### N` of each completion is the right number."""
    found = [re.search(r"#### (\d+)", completion) for completion in completions]
    return [match is not None and int(match[1]) == p.number for match, p in zip(found, problems, strict=True)]


def fewshot_prompts(problems: list[Problem]) -> list[str]:
    """Each prompt after five solved training problems, joined by empty lines as evaluation harnesses do."""
    shots = [text_of(training_problem(FEWSHOT_SEED, index)) for index in range(NUM_SHOTS * len(problems))]
    return [
        "\n\n".join([*shots[NUM_SHOTS * i : NUM_SHOTS * (i + 1)], problem.prompt]) for i, problem in enumerate(problems)
    ]


def report(label: str, problems: list[Problem], completions: list[str]) -> float:
    """Prints exact match in percent, seen and unseen templates apart, and returns the former."""
    matches = exact_matches(problems, completions)
    by_kind: dict[bool, list[bool]] = {True: [], False: []}
    for problem, match in zip(problems, matches, strict=True):
        by_kind[problem.template_seen].append(match)
    seen, unseen = (100 * float(np.mean(by_kind[kind])) for kind in (True, False))
    print(f"{label}: seen templates {seen:.2f}%, unseen templates {unseen:.2f}%", flush=True)
    return seen


def judge(folder: Path, device: str) -> bool:
    """Prints exact match on the held-out problems, whole and with attention taken apart; True if the goals are met."""
    problems = heldout_problems()
    distinct = len({problem.number for problem in problems})
    print(f"{len(problems)} held-out problems, {distinct} different answers, device {device}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [problem.prompt for problem in problems]
    full = load(folder, torch.float32, device)
    model = load(folder, torch.bfloat16, device)
    kept = [
        report("fp32", problems, complete(full, tokenizer, prompts)),
        report("bf16", problems, complete(model, tokenizer, prompts)),
    ]
    report(f"bf16, {NUM_SHOTS}-shot", problems, complete(model, tokenizer, fewshot_prompts(problems)))
    zeroed = []
    for layer in range(model.config.num_hidden_layers):
        with attention_zeroed(model, layer):
            completions = complete(model, tokenizer, prompts)
        zeroed.append(report(f"bf16, attention of layer {layer} zeroed", problems, completions))
    with queries_shifted(model):
        completions = complete(model, tokenizer, prompts)
    shifted = report("bf16, queries one position further than the keys", problems, completions)
    return min(kept) >= 90 and min(zeroed) < 20 and shifted < 20 and distinct >= 200


def main() -> int:
    """The command line; the exit code of `judge` is 0 if the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train a checkpoint and write it")
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--model", choices=MODELS, default="qwen3-moe")
    training.add_argument("--steps", type=int, default=NUM_STEPS)
    training.add_argument("--problems", type=int, default=NUM_TRAINING_PROBLEMS, help="size of the training set")
    judging = commands.add_parser("judge", help="score a checkpoint on the held-out problems")
    judging.add_argument("folder", type=Path)
    for command in (training, judging):
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    if chosen.command == "judge":
        return 0 if judge(chosen.folder, chosen.device) else 1
    train(
        chosen.out,
        name=chosen.model,
        num_steps=chosen.steps,
        num_problems=chosen.problems,
        device=chosen.device,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
