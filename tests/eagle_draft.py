"""Drafts for the tiny Qwen3 checkpoints that are right now and then: one linear layer, fitted in closed form.

Attention and MLP of the draft add nothing, so that its hidden state is ``fc`` of what SGLang hands to it. For EAGLE
that is the embedding of the token after a position and the target's normed hidden state there, fitted to the hidden
state of the next position; for EAGLE-3 the sums after three layers alone, and a second guess repeats the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: Layers whose sums the EAGLE-3 draft reads: SGLang's own choice is for models of more layers.
AUX_LAYERS = (0, 1, 2)


def make_draft(target: Path, folder: Path, algorithm: str, sequences: Sequence[Sequence[int]]) -> None:
    """Write into ``folder`` a draft of ``target`` for SGLang's ``algorithm``, EAGLE or EAGLE3.

    ``sequences``: token ids as the target will see them, which the draft is fitted on.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    config = model.config
    parts = [_states(model, ids) for ids in sequences]
    tensors = {f"{_LAYER[algorithm]}.{name}": value for name, value in _silent_layer(config, algorithm).items()}
    if algorithm == "EAGLE":
        x = torch.cat([torch.cat([one["embedded"][1:], one["normed"][:-1]], 1) for one in parts])
        fitted = _fit(torch.cat([x, torch.ones(x.shape[0], 1)], 1), torch.cat([one["normed"][1:] for one in parts]))
        tensors["fc.weight"], tensors["fc.bias"] = fitted[:, :-1], fitted[:, -1]
    else:
        unit = [one["sums"] / one["sums"].pow(2).mean(-1, keepdim=True).sqrt() for one in parts]
        tensors["fc.weight"] = _fit(torch.cat([one["aux"][:-1] for one in parts]), torch.cat([y[1:] for y in unit]))
        tensors["norm.weight"] = model.model.norm.weight.detach()
        tensors["lm_head.weight"] = model.lm_head.weight.detach()
    folder.mkdir(parents=True)
    save_file({name: value.bfloat16().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(config, algorithm)))


_LAYER = {"EAGLE": "layers.0", "EAGLE3": "midlayer"}


@torch.no_grad()
def _states(model: Any, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return what the target computes at each of the ids, [tokens, hidden size] each, ``aux`` three of them."""
    caught: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0][0]))
    states = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    hook.remove()
    aux = torch.cat([states[layer + 1][0] for layer in AUX_LAYERS], -1)
    return {"embedded": states[0][0], "normed": states[-1][0], "sums": caught[0], "aux": aux}


def _fit(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the w [columns of y, columns of x] with the least squares of x @ w.T - y."""
    return torch.linalg.lstsq(x.double(), y.double()).solution.T.float()


def _silent_layer(config: Any, algorithm: str) -> dict[str, torch.Tensor]:
    """Return a Llama layer with random queries, keys and gates whose outputs are zero."""
    generator = torch.Generator().manual_seed(0)
    hidden, inputs = config.hidden_size, config.hidden_size * (2 if algorithm == "EAGLE3" else 1)
    q_rows, kv_rows = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (q_rows, inputs), "self_attn.k_proj": (kv_rows, inputs),
        "self_attn.v_proj": (kv_rows, inputs), "mlp.gate_proj": (2 * hidden, hidden),
        "mlp.up_proj": (2 * hidden, hidden),
    }  # fmt: skip
    layer = {
        f"{name}.weight": torch.randn(*shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()
    }
    layer["self_attn.o_proj.weight"] = torch.zeros(hidden, q_rows)
    layer["mlp.down_proj.weight"] = torch.zeros(hidden, 2 * hidden)
    norms = ("post_attention_layernorm",) + (("input_layernorm", "hidden_norm") if algorithm == "EAGLE3" else ())
    return layer | {f"{name}.weight": torch.ones(hidden) for name in norms}


def _config(config: Any, algorithm: str) -> dict[str, Any]:
    stated: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle" if algorithm == "EAGLE" else "LlamaForCausalLMEagle3"],
        "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1,
        "intermediate_size": 2 * config.hidden_size,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "dtype": "bfloat16",
        "rope_theta": 10000.0, "rms_norm_eps": config.rms_norm_eps, "bos_token_id": None, "eos_token_id": 0,
    }  # fmt: skip
    same = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    stated |= {name: getattr(config, name) for name in (*same, "max_position_embeddings")}
    if algorithm == "EAGLE3":
        stated["draft_vocab_size"] = config.vocab_size
        stated["eagle_config"] = {
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        }  # fmt: skip
    return stated
