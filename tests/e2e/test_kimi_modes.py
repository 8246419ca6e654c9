"""Kimi-K2 in the ways that a server runs it: pages, chunked prefill, several ranks, and inside of a Kimi-K2.5."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import checks
import oracle
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from server import serve

CHECKPOINT = oracle.CHECKPOINTS["kimi"]
FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf_configs"
OURS = "atom_plugin.models.kimi_k2.KimiK2ForCausalLM"
ATOM = ("--model-impl", "atom", "--dtype", "float32")


def test_pages_and_chunked_prefill(tmp_path: Path) -> None:
    """Pages of 64 and prompts in chunks of 64, whose later ones attend to latents of earlier ones."""
    flags = ("--page-size", "64", "--chunked-prefill-size", "64")
    with serve(CHECKPOINT, *ATOM, *flags, folder=tmp_path) as running:
        checks.assert_holds_what_explain_says(running, "kimi", flags)
        checks.assert_serves_as_transformers(running, "kimi")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--tp-size", "2"),
        ("--tp-size", "2", "--ep-size", "2"),
        ("--tp-size", "2", "--ep-size", "2", "--dp-size", "2", "--enable-dp-attention"),
    ],
    ids=" ".join,
)
def test_two_ranks(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Heads, experts and shared experts over two ranks; each counted once."""
    with serve(CHECKPOINT, *ATOM, *flags, folder=tmp_path) as running:
        assert [rank["model"] for rank in running.ranks()] == [OURS] * 2
        checks.assert_holds_what_explain_says(running, "kimi", flags)
        checks.assert_fp32(checks.prefill_differences(running, "kimi", checks.solved("kimi", 24)), "prefill")
        checks.assert_fp32(checks.decode_differences(running, "kimi", checks.fragments("kimi", 12), 16), "decode")
        one = checks.fragments("kimi", 1)
        checks.assert_fp32(checks.decode_differences(running, "kimi", one, 8), "decode with an idle rank")


def test_the_language_model_of_kimi_k25(tmp_path: Path) -> None:
    """The same weights inside of a Kimi-K2.5: vision is neither loaded nor asked for, and images are refused."""
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINT, folder)
    text = json.loads((CHECKPOINT / "config.json").read_text())
    published = json.loads((FIXTURES / "moonshotai--Kimi-K2.5.json").read_text())
    outer = {name: value for name, value in published.items() if name != "auto_map"}
    outer |= {"text_config": text, "eos_token_id": text["eos_token_id"], "bos_token_id": None, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = load_file(CHECKPOINT / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.patch_embed.proj.bias"] = torch.zeros(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text_only = ("--json-model-override-args", '{"language_model_only": true}')  # or SGLang wants an image processor
    with serve(folder, *ATOM, *text_only, folder=tmp_path / "run") as running:
        assert running.ranks()[0]["model"] == "atom_plugin.models.kimi_k2.KimiK25ForConditionalGeneration"
        checks.assert_fp32(checks.prefill_differences(running, "kimi", checks.solved("kimi", 12)), "prefill")
        picture = "data:image/png;base64,iVBORw0KGgo="
        answer = requests.post(
            f"{running.url}/generate", json={"text": "What is it?", "image_data": picture}, timeout=60
        )
        assert answer.status_code == 400 and "this request has images, videos or audio" in answer.text, answer.text
        content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is it?"}]
        body = {"model": "kimi", "messages": [{"role": "user", "content": content}]}
        answer = requests.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert "1 tensors of the checkpoint are not loaded: the model has no part for vision" in running.log.read_text()
