"""What of speculative decoding is built: chains of an EAGLE draft of SGLang's, verified by our model or our backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atom_plugin import device, host
from atom_plugin.configs import ConfigError, draft_architecture
from atom_plugin.flags import EITHER, MODEL, Flag, flag_problems
from atom_plugin.register import NAME

#: --speculative-algorithm -> the architecture of the drafts that are tested with it, classes of SGLang's own.
DRAFTS = {"EAGLE": "LlamaForCausalLMEagle", "EAGLE3": "LlamaForCausalLMEagle3"}
SERVED = (None, *DRAFTS)
_RUNS_DRAFTS = "--speculative-draft-attention-backend triton, or another that SGLang runs drafts on"

#: As refusals.FLAGS, for launches that speculate.
FLAGS: tuple[Flag, ...] = (
    Flag(field="speculative_eagle_topk", served=(1,), parts=EITHER, why="a tree of drafts needs a mask"),
    Flag(field="speculative_adaptive", served=(False,), parts=EITHER, why="changing numbers of steps are not tested"),
    Flag(field="speculative_token_map", served=(None,), parts=MODEL, why="a draft of few tokens is not tested"),
    Flag(
        field="speculative_use_rejection_sampling",
        served=(False,),
        parts=EITHER,
        why="rejection sampling is not tested",
    ),
    Flag(field="enable_multi_layer_eagle", served=(False,), parts=EITHER, why="several drafts are not tested"),
    Flag(field="tp_size", served=(1,), parts=EITHER, why="speculation is not tested on several ranks"),
)


def speculation_problems(server_args: Any, parts: Sequence[str]) -> list[str]:
    """Return the reasons against how a launch speculates; empty where it does not, or by an algorithm of no use to us.

    ``server_args`` is SGLang's, resolved. ``parts``: which of ours it uses, "model" and "backend".
    """
    cfg = host.resolved(server_args)
    if cfg.speculative_algorithm not in DRAFTS:
        return []
    model_config = host.model_config(server_args)
    problems = flag_problems(FLAGS, cfg, parts) + machine_problems(device.arch()) + draft_problems(cfg)
    if host.attention_dp_size(server_args) > 1:
        problems.append("speculation with data-parallel attention is not tested: drop the --speculative-* flags")
    if host.uses_mla(model_config):
        problems.append("speculation over a latent (MLA) cache is not tested: drop the --speculative-* flags")
    if host.has_linear_attention(model_config):
        problems.append("speculation with layers of linear attention is not tested: drop the --speculative-* flags")
    return problems + backend_problems(server_args)


def machine_problems(arch: str) -> list[str]:
    """Return why a launch cannot speculate on ``arch``: nowhere yet, and tests lift it."""
    if device.is_accelerator(arch):
        return ["speculation has run in tests on a CPU, and on no GPU yet: drop the --speculative-* flags"]
    return ["speculation on a CPU: SGLang's kernels that verify a draft are not there; drop the --speculative-* flags"]


def draft_problems(cfg: Any) -> list[str]:
    """Return the reasons against the draft model of a launch that speculates."""
    wanted = DRAFTS[cfg.speculative_algorithm]
    if cfg.speculative_draft_model_path is None:
        return [f"--speculative-draft-model-path is not given: a draft of architecture {wanted} is required"]
    try:
        found = draft_architecture(cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision)
    except ConfigError as error:
        return [str(error)]
    if found == wanted:
        return []
    return [
        f"--speculative-draft-model-path {cfg.speculative_draft_model_path}: its architecture is {found}, and "
        f"--speculative-algorithm {cfg.speculative_algorithm} is tested with {wanted} alone"
    ]


def backend_problems(server_args: Any) -> list[str]:
    """Return the reasons against the attention backends of target and draft of a launch that speculates."""
    prefill, decode = host.attention_backends(server_args)
    draft = host.resolved(server_args).speculative_draft_attention_backend
    problems = []
    if NAME in (prefill, decode) and prefill != decode:
        problems.append(
            f"--prefill-attention-backend {prefill} and --decode-attention-backend {decode}: speculation with two "
            "backends is not tested, give one --attention-backend"
        )
    if draft == NAME:
        problems.append(
            f"--speculative-draft-attention-backend {NAME}: the atom attention backend does not run drafts; "
            f"give {_RUNS_DRAFTS}"
        )
    elif draft is None and NAME in (prefill, decode):
        problems.append(
            f"the atom attention backend verifies drafts and does not run them, as it would without a word; "
            f"add {_RUNS_DRAFTS}"
        )
    return problems
