"""Kimi-K2 is transformers' DeepseekV3ForCausalLM: logprobs of every form, batch and router, in fp32."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from transformers import DeepseekV3ForCausalLM

from atom_plugin.layers import mla
from atom_plugin.layers.mla import crossover, is_unabsorbed
from atom_plugin.models.kimi_k2 import KimiK2ForCausalLM
from tests.models import latent_world, tiny_kimi
from tests.models.latent_world import CHUNK_TOKENS, ApartBackend, World
from tests.models.tiny_kimi import YARN

#: fp32 against fp32, largest absolute difference of a logprob.
LARGEST = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "4 groups, 2 a token": {"n_group": 4, "topk_group": 2},
    "weights not normalised": {"norm_topk_prob": False, "routed_scaling_factor": 0.7},
    "yarn without mscale_all_dim": {"rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}},
    "yarn, both mscale differ": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    "no yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "no dense layer": {"first_k_dense_replace": 0},
}


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with latent_world.one_process():
        yield


@pytest.fixture(scope="module", params=VARIANTS)
def models(request: pytest.FixtureRequest) -> tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM]:
    """Transformers' model and ours, with the same weights."""
    return pair(**VARIANTS[request.param])


@pytest.fixture(scope="module")
def published() -> tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM]:
    """The variant that the published models are."""
    return pair()


def pair(**changes: Any) -> tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM]:
    config = tiny_kimi.make_config(**changes)
    oracle = tiny_kimi.make_oracle(config)
    return oracle, latent_world.make_ours(config, oracle)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def wanted(oracle: DeepseekV3ForCausalLM, ids: list[int]) -> torch.Tensor:
    return oracle(torch.tensor([ids])).logits[0].log_softmax(-1)


def largest(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape and got.isfinite().all()
    return float((got - want).abs().max())


def test_every_variant(models: tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM]) -> None:
    """A batch of new prompts of odd lengths, a second part after a cached prefix, and decode steps."""
    oracle, ours = models
    world = World(ours)
    sequences = {0: tokens(61, 1), 1: tokens(7, 2), 2: tokens(33, 3)}
    firsts = {0: 40, 1: 1, 2: 17}
    parts = [world.extend({row: ids[: firsts[row]] for row, ids in sequences.items()})]
    assert set(world.backend.calls) == {"un-absorbed"}
    parts.append(world.extend({row: ids[firsts[row] : -3] for row, ids in sequences.items()}))
    assert set(world.backend.calls) == {"un-absorbed", "absorbed"}
    for step in (-3, -2, -1):
        parts.append(world.decode({row: ids[step] for row, ids in sequences.items()}))
    for row, ids in sequences.items():
        got = torch.cat([part[row] for part in parts])
        assert largest(got, wanted(oracle, ids)) <= LARGEST, f"request {row}"


def test_the_oracle_is_peaky_and_its_router_decided(models: tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM]) -> None:
    """Otherwise a wrong key, scale or expert would hardly show."""
    oracle, _ = models
    with torch.no_grad():
        out = oracle(torch.tensor([tokens(61, 1)]), output_attentions=True)
    late = torch.stack([layer[0, :, 30:].max(-1).values for layer in out.attentions])
    print(f"likeliest key {late.mean():.2f}, margin of the router {router_margins(oracle).min():.1e}")
    assert late.mean() > 0.25
    assert router_margins(oracle).min() > 1e-6


def with_bias_in_the_weights(model: KimiK2ForCausalLM) -> None:
    for layer in model.model.layers[1:]:
        original = layer.mlp.gate.forward
        layer.mlp.gate.forward = lambda hidden, layer=layer, original=original: (
            (original(hidden).sigmoid() + layer.mlp.gate.e_score_correction_bias).clamp(1e-4, 0.9999).logit()
        )
        layer.mlp.gate.e_score_correction_bias.data = torch.zeros_like(layer.mlp.gate.e_score_correction_bias)
        layer.mlp.topk.topk_config.correction_bias = layer.mlp.gate.e_score_correction_bias


def with_the_factor_twice(model: KimiK2ForCausalLM) -> None:
    model.model.layers[2].mlp.routed_scaling_factor **= 2


def without_mscale(model: KimiK2ForCausalLM) -> None:
    for layer in model.model.layers:
        layer.self_attn.attn_mqa.scaling = layer.self_attn.attn_mha.scaling = model.spec.qk_head_dim**-0.5


def with_frequencies_in_another_order(model: KimiK2ForCausalLM) -> None:
    for layer in model.model.layers:
        rotary = copy.deepcopy(layer.self_attn.rotary_emb)  # SGLang hands the same one to every model
        rotary.cos_sin_cache = torch.cat([half.flip(1) for half in rotary.cos_sin_cache.chunk(2, dim=1)], dim=1)
        layer.self_attn.rotary_emb = rotary


def without_shared_experts(model: KimiK2ForCausalLM) -> None:
    model.model.layers[1].mlp.shared_experts.down_proj.weight.data.zero_()


def with_another_norm(model: KimiK2ForCausalLM) -> None:
    model.model.layers[2].self_attn.kv_a_layernorm.weight.data.fill_(1.0)


@pytest.mark.parametrize(
    "fault",
    [
        with_bias_in_the_weights,
        with_the_factor_twice,
        without_mscale,
        with_frequencies_in_another_order,
        without_shared_experts,
        with_another_norm,
    ],
)
def test_a_planted_fault_shows(fault: Callable[[KimiK2ForCausalLM], None]) -> None:
    """Each is far above what is tolerated."""
    oracle, ours = pair()
    fault(ours)
    ids = tokens(29, 8)
    (got,) = World(ours).extend({0: ids})
    assert largest(got, wanted(oracle, ids)) > 100 * LARGEST


def router_margins(oracle: DeepseekV3ForCausalLM) -> torch.Tensor:
    """Return by how much the last expert taken was better than the first one left out, where groups do not decide."""
    margins = []

    def note(router: Any, args: Any, output: Any) -> None:
        choice = output[0].sigmoid() + router.e_score_correction_bias
        ranked = choice.sort(-1, descending=True).values
        margins.append(ranked[:, router.top_k - 1] - ranked[:, router.top_k])

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in oracle.model.layers[1:]]
    wanted(oracle, tokens(61, 1))
    for hook in hooks:
        hook.remove()
    return torch.stack(margins)


@pytest.mark.parametrize("new", [1, 2, 7, 45])
@pytest.mark.parametrize("prefix", [1, CHUNK_TOKENS // 2, CHUNK_TOKENS // 2 + 1, 95])
def test_absorbed_is_unabsorbed(
    new: int,
    prefix: int,
    published: tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After prefixes of two lengths, of which one may be nothing, in chunks and at once, both are transformers'."""
    oracle, ours = published
    latent_world.chunk_in_pytorch(monkeypatch)
    monkeypatch.setattr(mla, "crossover", lambda spec: 0.0)
    sequences = {0: tokens(prefix + new, 4), 1: tokens(11 + new, 5), 2: tokens(new, 6)}
    cached = {0: prefix, 1: 11, 2: 0}
    found = {}
    for expands in (False, True):
        world = World(ours, expands_prefixes=expands)
        world.extend({row: sequences[row][:length] for row, length in cached.items() if length})
        world.backend.calls.clear()
        found[expands] = world.extend({row: ids[cached[row] :] for row, ids in sequences.items()})
        chunks = -(-prefix // (CHUNK_TOKENS // 3)) if prefix > 11 else 1
        assert world.backend.calls.count("prefix chunk") == (3 * chunks if expands else 0)
        assert ("absorbed" in world.backend.calls) is not expands
    for row, ids in sequences.items():
        want = wanted(oracle, ids)[cached[row] :]
        assert largest(found[False][row], want) <= LARGEST
        assert largest(found[True][row], want) <= LARGEST


@pytest.mark.parametrize("page_size", [1, 64])
def test_on_our_backend(
    page_size: int, published: tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New prompts, parts after cached prefixes, expanded in chunks and absorbed, and decode."""
    oracle, ours = published
    latent_world.chunk_in_pytorch(monkeypatch)
    monkeypatch.setattr(mla, "crossover", lambda spec: 0.0)
    sequences = {0: tokens(131, 9), 1: tokens(70, 10), 2: tokens(12, 11)}
    ends = [{0: 64, 1: 1}, {0: 127, 1: 66, 2: 8}, {0: 128, 1: 67, 2: 9}]
    for expands in (False, True):
        world = World(ours, expands_prefixes=expands, on_atom=page_size)
        found: dict[int, list[torch.Tensor]] = {row: [] for row in sequences}
        for until in ends:
            news = {row: sequences[row][world.lengths[row] : end] for row, end in until.items()}
            for row, part in zip(news, world.extend(news), strict=True):
                found[row].append(part)
        for step in range(3):
            for row, part in enumerate(world.decode({row: ids[step - 3] for row, ids in sequences.items()})):
                found[row].append(part)
        for row, ids in sequences.items():
            assert largest(torch.cat(found[row]), wanted(oracle, ids)) <= LARGEST, f"request {row}"


def test_nothing_to_do(published: tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM]) -> None:
    """An idle rank has no rows, and attention is not asked for any."""
    positions, hidden = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 64)
    assert published[1].model.layers[1].self_attn(positions, hidden, None).shape == (0, 64)


def test_crossover(published: tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM]) -> None:
    """171 in a published Kimi-K2; and no form is better where a latent is no larger than what it stands for."""
    spec = published[1].spec
    kimi = dataclasses.replace(spec, kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128, qk_rope_head_dim=64)
    assert crossover(kimi) == pytest.approx(170.67, abs=0.01)
    assert crossover(dataclasses.replace(spec, kv_lora_rank=20, qk_nope_head_dim=20, v_head_dim=20)) == float("inf")


@pytest.mark.parametrize(
    ("new", "cached", "unabsorbed"),
    [
        ([5], [0], True),
        ([168], [4000], True),
        ([167], [4000], False),
        ([1, 400], [4000, 0], False),
        ([1, 1500], [4000, 0], True),
        ([1], [1], False),
    ],
)
def test_which_form(
    new: list[int],
    cached: list[int],
    unabsorbed: bool,
    published: tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the pairs that a cached key is in; new prompts un-absorbed, prefixes never where nobody expands them."""
    spec = dataclasses.replace(
        published[1].spec, kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128, qk_rope_head_dim=64
    )
    for expands in (False, True):
        monkeypatch.setattr(mla, "may_expand_prefixes", lambda expands=expands: expands)
        batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, extend_seq_lens_cpu=new, extend_prefix_lens_cpu=cached)
        assert is_unabsorbed(spec, batch) == (unabsorbed if expands or not any(cached) else False)
        for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
            assert not is_unabsorbed(spec, SimpleNamespace(**{**vars(batch), "forward_mode": mode}))


def test_on_a_backend_that_wants_rotated_columns_apart(
    published: tuple[DeepseekV3ForCausalLM, KimiK2ForCausalLM],
) -> None:
    """As SGLang's FA3 and FlashInfer: a prompt, a part after it, and decode."""
    oracle, ours = published
    ids = tokens(41, 12)
    world = World(ours, dense=ApartBackend)
    parts = [world.extend({1: ids[:20]}), world.extend({1: ids[20:40]}), world.decode({1: ids[40]})]
    assert world.backend.calls.count("absorbed") == 2 * ours.spec.num_hidden_layers
    assert largest(torch.cat([part[0] for part in parts]), wanted(oracle, ids)) <= LARGEST
