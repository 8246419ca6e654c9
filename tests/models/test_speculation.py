"""What our Qwen3 models offer to a draft, on our backend: hidden states, sums after layers, embedding and head.

Batches are SGLang's own, a prefill and a chain to verify; transformers' fp32 model says what they should give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from transformers import AutoConfig, AutoModelForCausalLM

from atom_plugin.attention.backend import AtomAttentionBackend
from atom_plugin.resolve import class_of
from tests.attention.world import verify_input
from tests.models.latent_world import one_process

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = {"moe": EXAMPLES / "tiny-qwen3-moe", "dense": EXAMPLES / "tiny-qwen3"}
MAX_CONTEXT, PAGE = 128, 16
#: New tokens of two requests: their prompts, then a chain of four each.
PROMPTS = ((5, 6, 7, 8, 9, 10, 11), (20,))
CHAINS = ((31, 32, 33, 34), (41, 42, 43, 44))
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with one_process():
        yield


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> Path:
    """A tiny checkpoint: experts and an untied head, or a dense one whose head is its embedding."""
    return FOLDERS[request.param]


def ours(folder: Path) -> Any:
    """Return our model of a checkpoint, in fp32."""
    config = AutoConfig.from_pretrained(folder)
    model = class_of(config)[0](config)
    model.load_weights((name, tensor.float()) for name, tensor in load_file(folder / "model.safetensors").items())
    return model


def backend_of(model: Any) -> AtomAttentionBackend:
    """Return our backend over pools of two requests, whose rows of slots are in order."""
    size, spec = 2 * MAX_CONTEXT, model.spec
    pool = MHATokenToKVPool(
        size=size, page_size=PAGE, dtype=torch.float32, head_num=spec.num_key_value_heads, head_dim=spec.head_dim,
        layer_num=spec.num_hidden_layers, device="cpu", enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip
    table = ReqToTokenPool(size=2, max_context_len=MAX_CONTEXT, device="cpu", enable_memory_saver=False)
    table.req_to_token[1:3] = PAGE + torch.arange(size, dtype=torch.int32).view(2, MAX_CONTEXT)
    runner = SimpleNamespace(
        req_to_token_pool=table, token_to_kv_pool=pool, page_size=PAGE, dtype=torch.float32,
        model_config=SimpleNamespace(context_len=MAX_CONTEXT), model=model,
    )  # fmt: skip
    return AtomAttentionBackend(runner)


def run(
    model: Any, backend: AtomAttentionBackend, mode: ForwardMode, news: Sequence[Sequence[int]], cached: list[int]
) -> LogitsProcessorOutput:
    """Run both requests, after what is ``cached`` of each, as an EAGLE worker has the target run."""
    nums = [len(ids) for ids in news]
    prefix, rows = torch.tensor(cached), torch.tensor([1, 2])
    lens = prefix + torch.tensor(nums)
    positions = torch.cat([torch.arange(start, start + num) for start, num in zip(cached, nums, strict=True)])
    slots = backend.req_to_token_pool.req_to_token[rows.repeat_interleave(torch.tensor(nums)), positions].long()
    stated = prefix if mode.is_target_verify() else lens
    batch = ForwardBatch(
        forward_mode=mode, batch_size=2, input_ids=torch.tensor([token for ids in news for token in ids]),
        req_pool_indices=rows, seq_lens=stated, seq_lens_cpu=stated, out_cache_loc=slots,
        seq_lens_sum=int(stated.sum()), positions=positions, capture_hidden_mode=CaptureHiddenMode.FULL,
    )  # fmt: skip
    if mode.is_target_verify():
        batch.spec_info = verify_input(nums[0], topk=1)
    else:
        batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(nums, dtype=torch.int32), nums
        batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = prefix.int(), cached
    backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
        return model(batch.input_ids, batch.positions, batch)


@torch.no_grad()
def wanted(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    """Return of each request (logits, normed hidden states, the sums after each layer), prompt and chain together."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    last: list[torch.Tensor] = []  # transformers shows the last sum normed
    oracle.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    found = []
    for prompt, chain in zip(PROMPTS, CHAINS, strict=True):
        out = oracle(torch.tensor([prompt + chain]), output_hidden_states=True)
        sums = [*out.hidden_states[1:-1], last[-1]]
        found.append((out.logits[0], out.hidden_states[-1][0], [one[0] for one in sums]))
    return found


def first_and_rest(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the prompts' rows, the chains' rows) of [tokens, ...] of each request, as batches have them."""
    lengths = [len(prompt) for prompt in PROMPTS]
    firsts = [one[:length] for one, length in zip(rows, lengths, strict=True)]
    rests = [one[length:] for one, length in zip(rows, lengths, strict=True)]
    return torch.cat(firsts), torch.cat(rests)


@pytest.mark.parametrize("layers", [None, (0, 2, 3), (2,)], ids=["EAGLE", "EAGLE-3", "EAGLE-3 of one layer"])
def test_hidden_states(folder: Path, layers: tuple[int, ...] | None) -> None:
    """EAGLE gets the normed hidden state of every token; EAGLE-3 the sums after its layers, side by side."""
    model = ours(folder)
    if layers is not None:
        model.set_eagle3_layers_to_capture(list(layers))
    assert model.capture_aux_hidden_states == (layers is not None)
    backend = backend_of(model)
    prefill = run(model, backend, ForwardMode.EXTEND, PROMPTS, [0, 0])
    verify = run(model, backend, ForwardMode.TARGET_VERIFY, CHAINS, [len(prompt) for prompt in PROMPTS])
    outputs = wanted(folder)
    states = [
        normed if layers is None else torch.cat([sums[layer] for layer in layers], -1) for _, normed, sums in outputs
    ]
    for got, expected in zip((prefill, verify), first_and_rest(states), strict=True):
        torch.testing.assert_close(got.hidden_states, expected, **CLOSE)
    _, logits = first_and_rest([logits for logits, _, _ in outputs])
    torch.testing.assert_close(verify.next_token_logits, logits, **CLOSE)


def test_embedding_and_head(folder: Path) -> None:
    """The very tensors, which the draft then shares."""
    model = ours(folder)
    embedding, head = model.get_embed_and_head()
    assert embedding is model.model.embed_tokens.weight and head is model.lm_head.weight
    assert (embedding is head) == model.spec.tie_word_embeddings


@pytest.mark.parametrize("layers", [None, [], [1, 1], [4], [-1, 2]])
def test_layers_that_are_not_there(folder: Path, layers: list[int] | None) -> None:
    """SGLang's own three do not exist in a model of four layers, and it would hand over fewer states in silence."""
    with pytest.raises(ValueError, match="of a model of 4: different ones of 0 to 3"):
        ours(folder).set_eagle3_layers_to_capture(layers)


def test_the_three_layers_of_sglang(folder: Path) -> None:
    """They are named by what runs after them: layers 2, half and the third to last."""
    model = ours(folder)
    model.spec = SimpleNamespace(num_hidden_layers=48)
    model.set_eagle3_layers_to_capture()
    assert model.model.captured_layers == {1, 23, 44}
