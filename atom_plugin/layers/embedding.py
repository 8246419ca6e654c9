"""Token embedding and language-model head, split over the vocabulary."""

from __future__ import annotations

from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.runtime_context import get_parallel
from torch import nn

from atom_plugin.configs import DecoderSpec


def make_embedding(vocab_size: int, hidden_size: int, *, prefix: str) -> nn.Module:
    """Return the embedding: under attention DP each DP rank holds a whole one over its attention-TP group."""
    return VocabParallelEmbedding(vocab_size, hidden_size, prefix=prefix, use_attn_tp_group=is_dp_attention_enabled())


def make_lm_head(spec: DecoderSpec, embed_tokens: nn.Module) -> nn.Module:
    """Return the head: the embedding itself when tied, unless attention DP splits the two in different ways."""
    if spec.tie_word_embeddings and not is_dp_attention_enabled():
        return embed_tokens
    return ParallelLMHead(
        spec.vocab_size, spec.hidden_size, prefix="lm_head", use_attn_tp_group=get_parallel().enable_dp_lm_head
    )
