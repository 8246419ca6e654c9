"""Attention backends with the two classic faults of graph replay, which the CPU graph must catch."""

from __future__ import annotations

from typing import Any

LIVE = "planted_live"
FROZEN = "planted_frozen"


def _live(runner: Any) -> Any:
    from atom_plugin.attention.backend import AtomAttentionBackend

    class ReadsLiveTensors(AtomAttentionBackend):
        """Builds the metadata of a replay in new memory, which a captured graph never looks at."""

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            if in_capture:
                super().init_forward_metadata_out_graph(forward_batch, in_capture=True)
            else:
                self.init_forward_metadata(forward_batch)

    return ReadsLiveTensors(runner)


def _frozen(runner: Any) -> Any:
    from atom_plugin.attention.backend import AtomAttentionBackend

    class FreezesLengths(AtomAttentionBackend):
        """Replays with the lengths that the graph was captured with."""

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            if in_capture:
                super().init_forward_metadata_out_graph(forward_batch, in_capture=True)
                self._of_capture = {
                    **vars(self).get("_of_capture", {}),
                    forward_batch.batch_size: self.forward_metadata,
                }
            else:
                self.forward_metadata = self._of_capture[forward_batch.batch_size]

    return FreezesLengths(runner)


def register() -> None:
    """Give both a name, in every process: `--attention-backend planted_live`, `planted_frozen`."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([LIVE, FROZEN])
    register_attention_backend(LIVE)(_live)
    register_attention_backend(FROZEN)(_frozen)
