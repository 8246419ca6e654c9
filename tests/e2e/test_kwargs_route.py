"""The mission's core, recorded inside the backend: raw q and k arrive with cos_sin_cache and is_neox in every mode,
norm, rope and store happen once, and what lies in the pool is transformers' normed and rotated K."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checks
import oracle
import pytest
import torch
from server import Server, serve

from tests.cpu_graph.harness import cpu_graph_env, read_report

CHECKPOINT = "moe"
ATOM = ("--model-impl", "atom", "--dtype", "float32")
DP2 = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
FUSED = {"fused": 1}
UNFUSED = {"model_norm": 2, "model_rope": 1, "pool_store": 1}
TOLERANCE = 1e-4
BOTH = {"EXTEND", "DECODE"}


def run(server: Server) -> None:
    """Drive extend, chunks, a cached prefix and decode."""
    whole = checks.joined(CHECKPOINT, (4,))
    checks.decode(server, whole, 6, ignore_eos=True)
    checks.decode(server, (whole[0] + checks.prompts(CHECKPOINT, 1)[0],), 4, ignore_eos=True)
    checks.decode(server, checks.prompts(CHECKPOINT, 5), 8, ignore_eos=True)


def steps(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the recorded forward steps."""
    for path in sorted(folder.glob("*.pt")):
        yield torch.load(path)


def keys_of(sequences: list[tuple[int, ...]]) -> list[list[torch.Tensor]]:
    """Return transformers' normed and rotated K: for each sequence and layer [tokens, kv heads, head_dim]."""
    return [
        [layer.keys[0].transpose(0, 1) for layer in out.past_key_values.layers]
        for out in oracle.forward(CHECKPOINT, sequences, use_cache=True)
    ]


def served_sequences(server: Server) -> list[tuple[int, ...]]:
    """Return the whole sequences of ``run`` (greedy answers are the same each time)."""
    whole = checks.joined(CHECKPOINT, (4,))
    asked = [(whole, 6), ((whole[0] + checks.prompts(CHECKPOINT, 1)[0],), 4), (checks.prompts(CHECKPOINT, 5), 8)]
    result = []
    for prompts, count in asked:
        for ids, one in zip(prompts, checks.decode(server, prompts, count, ignore_eos=True), strict=True):
            result.append((*ids, *(entry[1] for entry in one["meta_info"]["output_token_logprobs"])))
    return result


def assert_recorded(
    folder: Path, sequences: list[tuple[int, ...]], *, expected: dict[str, int]
) -> tuple[set[str], int]:
    """Check every layer of every step against transformers; return the modes met and the number of padded rows."""
    keys = keys_of(sequences)
    hf = oracle.model(CHECKPOINT).model
    modes: set[str] = set()
    real_rows = padded_rows = 0
    for step in steps(folder):
        for call in step:
            modes.add(call["mode"].removeprefix("ForwardMode."))
            padded_rows += int((call["slots"] == 0).sum())
            fused = expected == FUSED
            assert call["counts"] == expected, (call["mode"], call["layer"], call["counts"])
            assert call["kwargs"] == (["cos_sin_cache", "is_neox", "save_kv_cache"] if fused else ["save_kv_cache"]), (
                call["kwargs"]
            )
            attention = hf.layers[call["layer"]].self_attn
            heads = call["pool_k"].shape[1]
            raw = call["raw_k"].view(-1, heads, call["pool_k"].shape[2])
            if fused:
                cos, sin = hf.rotary_emb(raw[None], call["positions"][None])
                normed = attention.k_norm(raw)[None].transpose(1, 2)
                rotated = normed * cos[:, None] + rotate_half(normed) * sin[:, None]
                real = call["slots"] > 0
                torch.testing.assert_close(
                    call["pool_k"][real], rotated[0].transpose(0, 1)[real], atol=TOLERANCE, rtol=0
                )
            for row in (call["slots"] > 0).nonzero()[:, 0].tolist():
                position, token = int(call["positions"][row]), int(call["input_ids"][row])
                candidates = [
                    keys[index][call["layer"]][position]
                    for index, ids in enumerate(sequences)
                    if position < len(ids) and ids[position] == token
                ]
                if not candidates:
                    continue  # a health probe or the last sampled token, which no answer contains
                nearest = min(float((call["pool_k"][row] - one).abs().max()) for one in candidates)
                assert nearest <= TOLERANCE, (call["mode"], call["layer"], position, nearest)
                real_rows += 1
    assert real_rows > 1000
    return modes, padded_rows


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return (-second half, first half) of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@pytest.mark.parametrize("fuse", ["1", "0"])
def test_eager_chunked(fuse: str, tmp_path: Path) -> None:
    """Extend, chunks and decode; forced un-fused, the same logprobs and the same pool."""
    record = tmp_path / "record"
    record.mkdir()
    env = {"ATOM_TEST_RECORD": str(record), "ATOM_PLUGIN_FUSE_QK_NORM_ROPE": fuse}
    flags = (*ATOM, "--chunked-prefill-size", "64")
    with serve(oracle.CHECKPOINTS[CHECKPOINT], *flags, folder=tmp_path, env=env) as server:
        run(server)
        sequences = served_sequences(server)
        modes, _ = assert_recorded(record, sequences, expected=FUSED if fuse == "1" else UNFUSED)
        assert modes >= BOTH, modes
        checks.assert_fp32(
            checks.decode_differences(server, CHECKPOINT, checks.fragments(CHECKPOINT, 12), 16), "decode"
        )


def test_attention_dp_padding(tmp_path: Path) -> None:
    """Attention DP pads the batches of its ranks to one length; padded rows go to slot 0 alone."""
    record = tmp_path / "record"
    record.mkdir()
    env = {"ATOM_TEST_RECORD": str(record)}
    with serve(oracle.CHECKPOINTS[CHECKPOINT], *ATOM, *DP2, folder=tmp_path, env=env) as server:
        run(server)
        modes, padded_rows = assert_recorded(record, served_sequences(server), expected=FUSED)
        assert modes >= BOTH and padded_rows > 0


def test_decode_graph(tmp_path: Path) -> None:
    """SGLang's own DecodeCudaGraphRunner, re-running what it captured: padded batches, and the same pool."""
    record = tmp_path / "record"
    record.mkdir()
    env = cpu_graph_env(tmp_path / "graph")
    flags = (*ATOM, "--cuda-graph-max-bs-decode", "8")
    with serve(
        oracle.CHECKPOINTS[CHECKPOINT], *flags, folder=tmp_path, env={**env, "ATOM_TEST_RECORD": str(record)}
    ) as server:
        run(server)
        modes, padded_rows = assert_recorded(record, served_sequences(server), expected=FUSED)
        assert modes >= BOTH and padded_rows > 0
        checks.assert_fp32(
            checks.decode_differences(server, CHECKPOINT, checks.fragments(CHECKPOINT, 7), 16), "decode in graphs"
        )
        report = read_report(env)
        assert report.captured and report.num_replays > 20 and report.moved == []
        assert all("ops/paged_attention" in what for what in report.resized)
