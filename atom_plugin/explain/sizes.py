"""Parameters and bytes of a model on one of its ranks, worked out from its config alone.

What the ranks hold is what models/ builds: the tests compare with the checkpoints' headers, with transformers' classes
and with the parameters and pools of servers that run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atom_plugin.configs import BlockFp8, KimiK2Spec, KimiLinearSpec, PackedInt4, Qwen3MoeSpec, ServedSpec
from atom_plugin.configs.latent_moe import LatentMoeSpec
from atom_plugin.explain.plan import GIB, ExplainedSpec, Plan, outlines_of

_FP32 = 4
_VOCABULARY_UNIT = 64  # SGLang pads the vocabulary to a multiple of it


@dataclass
class Count:
    """Numbers of weights of one kind. ``active``: of them a token meets; ``on_rank``, ``bytes_on_rank``: of one rank.

    Scales of quantised weights are bytes, and no parameters.
    """

    total: int = 0
    active: int = 0
    on_rank: int = 0
    bytes_on_rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of a model by kind, in the order of a forward pass."""

    kinds: dict[str, Count] = field(default_factory=dict)

    @property
    def sum(self) -> Count:
        """Return all kinds together."""
        counts = self.kinds.values()
        return Count(
            total=sum(one.total for one in counts),
            active=sum(one.active for one in counts),
            on_rank=sum(one.on_rank for one in counts),
            bytes_on_rank=sum(one.bytes_on_rank for one in counts),
        )


def kv_bytes_a_token(spec: ExplainedSpec, plan: Plan) -> int:
    """Return the bytes that one token takes in the KV cache of one rank, all layers together.

    Latent rows are whole on every rank. KDA layers keep a state a request and nothing a token.
    """
    layer = outlines_of(spec, plan.attention_tp)[0]
    kda = len(spec.kda_layers) if isinstance(spec, KimiLinearSpec) else 0
    numbers = layer.qk_head_dim
    if not isinstance(spec, LatentMoeSpec):
        numbers = layer.tp_k_head_num * (layer.qk_head_dim + layer.v_head_dim)
    return (spec.num_hidden_layers - kda) * numbers * plan.pool_dtype.itemsize


def tokens_that_fit(memory_gib: float, plan: Plan, weight_bytes: int, token_bytes: int) -> int:
    """Return the tokens, in whole pages, that one rank's cache holds beside its weights; 0 where these do not fit.

    ``memory_gib``: of the device. As SGLang sizes its pool, and an upper bound: what else is on the device before
    (communication buffers, the framework itself) is not known here.
    """
    left = int(memory_gib * GIB * plan.mem_fraction) - weight_bytes
    return max(0, left // token_bytes // plan.page_size * plan.page_size)


def weights_of(spec: ServedSpec, plan: Plan) -> Weights:
    """Return the weights of a model of ours; raises ValueError where its heads cannot be shared as planned."""
    counter = _Counter(spec, plan)
    counter.vocabulary()
    for index in range(spec.num_hidden_layers):
        layer = f"model.layers.{index}"
        counter.vector("norms", 2 * spec.hidden_size)
        if isinstance(spec, KimiK2Spec):
            counter.latent_attention(f"{layer}.self_attn", spec)
        else:
            counter.attention(f"{layer}.self_attn")
        if not isinstance(spec, (Qwen3MoeSpec, KimiK2Spec)) or index in spec.dense_layers:
            counter.gated_mlp("dense MLPs", f"{layer}.mlp", spec.intermediate_size)
        else:
            counter.experts(f"{layer}.mlp", spec)
    return counter.weights


class _Counter:
    """Adds up weights, layer by layer; widths are those of the whole model."""

    def __init__(self, spec: ServedSpec, plan: Plan) -> None:
        self.spec, self.plan, self.weights = spec, plan, Weights()
        self.hidden, self.itemsize = spec.hidden_size, plan.q_dtype.itemsize
        self.outline = outlines_of(spec, plan.attention_tp)[0]

    def vector(self, kind: str, size: int, *, itemsize: int | None = None) -> None:
        """Add a tensor that every rank holds whole and that is never quantised."""
        self._add(kind, size, size, size, size * (itemsize or self.itemsize))

    def linear(
        self,
        kind: str,
        name: str,
        shape: tuple[int, int],
        on_rank: tuple[int, int],
        *,
        copies: tuple[int, int, int] = (1, 1, 1),
        quantised: bool = True,
    ) -> None:
        """Add linear layer ``name``, weight [rows, columns], of which a rank holds ``on_rank``.

        ``copies``: how many of them there are, of those a token meets, and of those a rank holds.
        """
        everywhere, met, here = copies
        size, size_here = shape[0] * shape[1], on_rank[0] * on_rank[1]
        stored = self._bytes(name, *on_rank) if quantised else size_here * self.itemsize
        self._add(kind, everywhere * size, met * size, here * size_here, here * stored)

    def vocabulary(self) -> None:
        """Add embedding, head and final norm; under attention DP the embedding is split over attention TP alone."""
        spec, plan = self.spec, self.plan
        whole = (spec.vocab_size, self.hidden)
        self.linear("embedding", "", whole, self._vocabulary_of(plan.attention_tp), quantised=False)
        if not spec.tie_word_embeddings:
            self.linear("language-model head", "", whole, self._vocabulary_of(plan.tp), quantised=False)
        elif plan.dp > 1:  # the embedding's own weights once more, split in another way
            rows, columns = self._vocabulary_of(plan.tp)
            self._add("language-model head", 0, 0, rows * columns, rows * columns * self.itemsize)
        self.vector("norms", self.hidden)

    def attention(self, name: str) -> None:
        """Add q, k, v and o projections, and the norms of q and k."""
        spec, outline = self.spec, self.outline
        assert not isinstance(spec, KimiK2Spec)
        dim, hidden, ranks = spec.head_dim, self.hidden, self.plan.attention_tp
        query, key = spec.num_attention_heads * dim, spec.num_key_value_heads * dim
        query_here, key_here = outline.tp_q_head_num * dim, outline.tp_k_head_num * dim
        for part, rows, rows_here in (("q", query, query_here), ("k", key, key_here), ("v", key, key_here)):
            self.linear("attention", f"{name}.{part}_proj", (rows, hidden), (rows_here, hidden))
        self.linear("attention", f"{name}.o_proj", (hidden, query), (hidden, query // ranks))
        if spec.attention_bias:
            total, here = query + 2 * key, query_here + 2 * key_here
            self._add("attention", total, total, here, here * self.itemsize)
            self.vector("attention", hidden)
        self.vector("norms", 2 * dim)

    def latent_attention(self, name: str, spec: KimiK2Spec) -> None:
        """Add the projections and norms of MLA: what leads to a latent is whole on every rank."""
        hidden, ranks, heads = self.hidden, self.plan.attention_tp, spec.num_attention_heads
        for part, rows in (
            ("q_a_proj", spec.q_lora_rank),
            ("kv_a_proj_with_mqa", spec.kv_lora_rank + spec.qk_rope_head_dim),
        ):
            self.linear("attention", f"{name}.{part}", (rows, hidden), (rows, hidden))
        query, up = heads * spec.qk_head_dim, heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        value = heads * spec.v_head_dim
        self.linear("attention", f"{name}.q_b_proj", (query, spec.q_lora_rank), (query // ranks, spec.q_lora_rank))
        shape, here = (up, spec.kv_lora_rank), (up // ranks, spec.kv_lora_rank)
        self.linear("attention", f"{name}.kv_b_proj", shape, here, quantised=False)  # loaded as what FP8 blocks say
        self.linear("attention", f"{name}.o_proj", (hidden, value), (hidden, value // ranks))
        self.vector("norms", spec.q_lora_rank + spec.kv_lora_rank)

    def gated_mlp(self, kind: str, name: str, width: int) -> None:
        """Add gate, up and down projections, split over the whole TP group."""
        here = width // self.plan.tp
        for part in ("gate_proj", "up_proj"):
            self.linear(kind, f"{name}.{part}", (width, self.hidden), (here, self.hidden))
        self.linear(kind, f"{name}.down_proj", (self.hidden, width), (self.hidden, here))

    def experts(self, name: str, spec: Qwen3MoeSpec | KimiK2Spec) -> None:
        """Add the router and the experts: routed ones are split over EP ranks, and their width over the others."""
        self.vector("router", spec.num_experts * self.hidden)
        if isinstance(spec, KimiK2Spec):
            self.vector("router", spec.num_experts, itemsize=_FP32)
            self.gated_mlp(
                "shared experts", f"{name}.shared_experts", spec.num_shared_experts * spec.moe_intermediate_size
            )
        width, hidden, plan = spec.moe_intermediate_size, self.hidden, self.plan
        here = width // (plan.tp // plan.ep)
        copies = (spec.num_experts, spec.num_experts_per_tok, spec.num_experts // plan.ep)
        for part, shape, on_rank in (
            ("gate_proj", (width, hidden), (here, hidden)),
            ("up_proj", (width, hidden), (here, hidden)),
            ("down_proj", (hidden, width), (hidden, here)),
        ):
            self.linear("routed experts", f"{name}.experts.0.{part}", shape, on_rank, copies=copies)

    def _vocabulary_of(self, ranks: int) -> tuple[int, int]:
        unit = _VOCABULARY_UNIT
        if _up_to(self.spec.vocab_size, unit) % ranks:
            unit *= ranks
        return _up_to(self.spec.vocab_size, unit) // ranks, self.hidden

    def _bytes(self, name: str, rows: int, columns: int) -> int:
        """Return the bytes of a linear layer's weight [rows, columns], its scales included."""
        stored = self.spec.quantization
        if stored is None or not stored.covers(name):
            return rows * columns * self.itemsize
        if isinstance(stored, BlockFp8):
            blocks = -(-rows // stored.block[0]) * -(-columns // stored.block[1])
            return rows * columns + blocks * _FP32
        assert isinstance(stored, PackedInt4)
        return rows * columns // 2 + rows * columns // stored.group_size * self.itemsize

    def _add(self, kind: str, total: int, active: int, on_rank: int, bytes_on_rank: int) -> None:
        count = self.weights.kinds.setdefault(kind, Count())
        count.total += total
        count.active += active
        count.on_rank += on_rank
        count.bytes_on_rank += bytes_on_rank


def _up_to(number: int, unit: int) -> int:
    return -(-number // unit) * unit
