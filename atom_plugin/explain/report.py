"""The whole of what ``atom-plugin explain`` says about a model and a plan, as text or JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atom_plugin.configs import (
    ConfigError,
    KimiLinearSpec,
    ServedSpec,
    load_served_spec,
    load_spec,
    raw_config,
    served_family,
)
from atom_plugin.configs.latent_moe import LatentMoeSpec
from atom_plugin.explain.choices import Choice, explain
from atom_plugin.explain.plan import GIB, ExplainedSpec, Plan, outlines_of
from atom_plugin.explain.sizes import Weights, kv_bytes_a_token, tokens_that_fit, weights_of
from atom_plugin.layers.rope import why_not_rope
from atom_plugin.model_limits import parallel_problems, storage_problems
from atom_plugin.resolve import CLASSES

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
OWN = "SGLang's own model, with --attention-backend atom"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a launch of ``model`` would run and hold.

    ``model_class``: of ours, None where the model is SGLang's own; then its ``weights`` are not counted. ``refused``:
    why ``--model-impl atom`` does not serve it as planned. ``token_bytes``: of the KV cache of one rank.
    """

    model: str
    plan: Plan
    spec: ExplainedSpec
    model_class: str | None
    choices: list[Choice]
    refused: list[str]
    weights: Weights | None
    token_bytes: int

    @property
    def is_served(self) -> bool:
        """Return whether a launch would go on: every mode has a row, and nothing is refused."""
        return not self.refused and all(choice.row for choice in self.choices)

    @property
    def tokens(self) -> int | None:
        """Return how many tokens fit in the KV cache of one rank, None where memory or weights are not known."""
        if self.plan.memory_gib is None or self.weights is None:
            return None
        return tokens_that_fit(self.plan.memory_gib, self.plan, self.weights.sum.bytes_on_rank, self.token_bytes)


def read_config(model: str) -> tuple[str, Any]:
    """Return (what messages call it, what ``load_spec`` takes) of a folder, a config.json or a repo of the hub.

    Raises ConfigError where none can be read.
    """
    is_path = Path(model).exists() or model.endswith(".json")
    if not is_path and HUB_NAME.fullmatch(model):
        return raw_config(model, None)
    return model, model


def explanation_of(model: str, plan: Plan) -> Explanation:
    """Return the explanation of ``model``, as ``read_config`` takes it.

    Raises ConfigError for a config that is not ours to read, ValueError for a plan that no launch could have.
    """
    source, config = read_config(model)
    spec = load_spec(config, source=source)
    if not isinstance(spec, ExplainedSpec):
        spec = load_served_spec(config, source=source)  # which says that there is no model for it yet
    problems = why_not_rope(spec.rope) if spec.rope is not None else []
    if problems:
        raise ConfigError(f"{source}: {'; '.join(problems)}")
    choices = explain(spec, plan)
    refused: list[str] = []
    model_class, weights = None, None
    if isinstance(spec, ServedSpec):
        model_class = CLASSES[served_family(config)]
        refused = storage_problems(spec, plan.arch)
        refused += parallel_problems(spec, tp=plan.tp, ep=plan.ep, attention_tp=plan.attention_tp)
        weights = weights_of(spec, plan) if not refused else None
    return Explanation(
        model=model,
        plan=plan,
        spec=spec,
        model_class=model_class,
        choices=choices,
        refused=refused,
        weights=weights,
        token_bytes=kv_bytes_a_token(spec, plan),
    )


def report(model: str, plan: Plan, *, why: bool, as_json: bool) -> tuple[str, bool]:
    """Return (the explanation as text or JSON, whether a launch would go on); raises what ``explanation_of`` raises."""
    found = explanation_of(model, plan)
    return as_values(found) if as_json else as_text(found, why=why), found.is_served


def as_values(found: Explanation) -> str:
    """Return the explanation as JSON; counts in parameters and bytes."""
    weights = None
    if found.weights is not None:
        kinds = {kind: asdict(count) for kind, count in found.weights.kinds.items()}
        weights = {"kinds": kinds, "sum": asdict(found.weights.sum)}
    values = {
        "model": found.model,
        "model_class": found.model_class,
        "attention_backend": "atom",
        "plan": asdict(found.plan),
        "refused": found.refused,
        "weights": weights,
        "kv_bytes_a_token": {"rank": found.token_bytes, "all": found.token_bytes * found.plan.attention_tp},
        "tokens_that_fit": found.tokens,
        "choices": [asdict(choice) for choice in found.choices],
    }
    return json.dumps(values, indent=1)


def as_text(found: Explanation, *, why: bool) -> str:
    """Return the explanation for a person; ``why``: every refused row with its reasons."""
    plan = found.plan
    whose = "" if found.model_class else f" ({OWN})"
    lines = [
        f"{found.model}{whose} on {plan.arch}, AITER {plan.aiter}, attention TP {plan.attention_tp}: "
        f"{_in_words(found.spec, plan.attention_tp)}, "
        f"{plan.dtype}, KV cache {plan.kv_cache_dtype}, pages of {plan.page_size}"
    ]
    lines += [f"  REFUSED by --model-impl atom: {reason}" for reason in found.refused]
    lines += [f"  {name:<38}{value}" for name, value in _facts(found)]
    for choice in found.choices:
        lines.append(f"  {choice.mode:<38}{choice.row or 'NO ROW RUNS THIS'}")
        if why or choice.row is None:
            lines += [f"      not {name}: {reason}" for name, reasons in choice.refused.items() for reason in reasons]
    return "\n".join(lines)


def _facts(found: Explanation) -> list[tuple[str, str]]:
    plan = found.plan
    facts = [
        ("model class", found.model_class or "SGLang's own"),
        ("attention backend", "atom" + (", the default under --model-impl atom" if found.model_class else "")),
    ]
    if found.weights is None:
        reason = "the launch is refused" if found.refused else "models/ has no model for it"
        facts.append(("parameters", f"not counted: {reason}"))
    else:
        count = found.weights.sum
        facts.append(("parameters", f"{count.total:,}, of which a token meets {count.active:,}"))
        facts.append((f"weights on each of {plan.tp} ranks", f"{count.on_rank:,} of them, {_gib(count.bytes_on_rank)}"))
        facts += [
            (f"    {kind}", f"{one.on_rank:,} of {one.total:,}, {_gib(one.bytes_on_rank)}")
            for kind, one in found.weights.kinds.items()
        ]
    everywhere = found.token_bytes * plan.attention_tp
    facts.append(
        (
            "KV cache",
            f"{found.token_bytes:,} bytes a token on a rank, {everywhere:,} on the {plan.attention_tp} it is on",
        )
    )
    if plan.memory_gib is not None:
        share = f"{plan.memory_gib:g} GiB x {plan.mem_fraction:g}"
        fit = "not known: weights are not counted"
        if found.tokens is not None:
            fit = f"{found.tokens:,} at most in {share}"
            fit += f", {found.tokens * plan.dp:,} over {plan.dp} attention-DP replicas" if plan.dp > 1 else ""
        facts.append(("tokens that fit", fit if found.tokens != 0 else f"NONE: the weights do not fit in {share}"))
    return facts


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _in_words(spec: ExplainedSpec, attention_tp: int) -> str:
    """Return which layers attend, and with which heads on one of ``attention_tp`` ranks."""
    layer = outlines_of(spec, attention_tp)[0]
    of_kda = spec.kda_layers if isinstance(spec, KimiLinearSpec) else frozenset()
    if not isinstance(spec, LatentMoeSpec):
        heads = f"{layer.tp_q_head_num} query and {layer.tp_k_head_num} KV heads of {layer.qk_head_dim}"
        return f"layers 0 to {spec.num_hidden_layers - 1} have {heads} a rank"
    heads = (
        f"{layer.tp_q_head_num} query heads a rank over latent rows of {spec.kv_lora_rank} + {spec.qk_rope_head_dim}"
    )
    if not of_kda:
        return f"layers 0 to {spec.num_hidden_layers - 1} have {heads}"
    attending = [str(index) for index in range(spec.num_hidden_layers) if index not in of_kda]
    return f"layers {', '.join(attending)} have {heads} (the others are KDA, which SGLang runs)"
