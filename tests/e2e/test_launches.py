"""Every way in: `sglang serve`, `sglang.Engine`, a repo name, overrides, dummy weights, bf16, an FP8 cache."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import checks
import oracle
import torch
from safetensors.torch import load_file, save_file
from server import LOCK, environment, serve

MOE = oracle.CHECKPOINTS["moe"]
ATOM = ("--model-impl", "atom", "--dtype", "float32")
OUR_CLASS = "atom_plugin.models.qwen3_moe.Qwen3MoeForCausalLM"


def test_sglang_serve_with_a_repo_name_and_stacked_experts(tmp_path: Path) -> None:
    """`sglang serve`, offline, from a Hugging Face cache that the test builds; experts stacked, two tensors a layer."""
    repo = tmp_path / "hub" / "models--example--tiny"
    snapshot = repo / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(MOE, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    tensors = load_file(snapshot / "model.safetensors")
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: torch.stack([tensors.pop(f"{prefix}.{expert}.{name}.weight") for expert in range(8)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
        tensors[f"{prefix}.down_proj"] = parts["down_proj"]
    save_file(tensors, snapshot / "model.safetensors", metadata={"format": "pt"})
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    launcher = ("-c", "from sglang.cli.main import main; main()", "serve")  # what the command `sglang` does
    with serve("example/tiny", *ATOM, folder=tmp_path / "run", env=env, launcher=launcher) as server:
        assert server.ranks()[0]["model"] == OUR_CLASS
        checks.assert_fp32(checks.prefill_differences(server, "moe", checks.solved("moe", 24)), "prefill")


ENGINE = """
import json, sys
import sglang
if __name__ == "__main__":
    body = json.load(sys.stdin)
    engine = sglang.Engine(**body["engine"])
    answers = engine.generate(input_ids=body["ids"], sampling_params={"temperature": 0, "max_new_tokens": 1},
                              return_logprob=True, logprob_start_len=0)
    print("ANSWERS" + json.dumps([[e[0] for e in a["meta_info"]["input_token_logprobs"]][1:] for a in answers]))
    engine.shutdown()
"""


def test_engine_with_overrides(tmp_path: Path) -> None:
    """`sglang.Engine` from a script, with --json-model-override-args: the changed model, not the file's."""
    from filelock import FileLock

    override = {"rms_norm_eps": 0.05, "num_experts_per_tok": 3}
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    sequences = checks.solved("moe", 12)
    engine = {
        "model_path": str(MOE),
        "model_impl": "atom",
        "dtype": "float32",
        "device": "cpu",
        "max_total_tokens": 4096,
        "mem_fraction_static": 0.2,
        "json_model_override_args": json.dumps(override),
    }
    with FileLock(str(LOCK)):
        ran = subprocess.run(
            [sys.executable, script],
            input=json.dumps({"engine": engine, "ids": [list(ids) for ids in sequences]}),
            env=environment(tmp_path, {}),
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert "ANSWERS" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-4000:]
    (facts,) = [json.loads(path.read_text()) for path in tmp_path.glob("rank*.json")]
    assert facts["model"] == OUR_CLASS and facts["backends"] == ["atom_plugin.attention.backend.AtomAttentionBackend"]
    from transformers import AutoModelForCausalLM

    changed = AutoModelForCausalLM.from_pretrained(MOE, dtype=torch.float32, attn_implementation="eager", **override)
    expected = []
    for ids in sequences:
        logits = changed(torch.tensor([list(ids)])).logits[0, :-1]
        expected.append(logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    got = json.loads(ran.stdout.rsplit("ANSWERS", 1)[1])
    assert checks.differences(checks.want("moe", sequences), expected).mean > 0.05, "the override changes nothing"
    checks.assert_fp32(checks.differences(got, expected), "with overrides")


def test_dummy_weights(tmp_path: Path) -> None:
    """`--load-format dummy` needs a config and a tokenizer only, and answers finite logprobs."""
    folder = tmp_path / "model"
    shutil.copytree(MOE, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with serve(folder, "--model-impl", "atom", "--load-format", "dummy", folder=tmp_path / "run") as server:
        assert server.ranks()[0]["model"] == OUR_CLASS
        (one,) = server.logprobs([[5, 6, 7, 8]])
        assert len(one) == 3 and all(value < 0 for value in one)


def test_bf16_is_as_close_as_sglangs_own(tmp_path: Path) -> None:
    """bf16 against transformers' fp32 on the same weights: mean and p99 at most 1.25 times those of SGLang's model."""
    found = {}
    for name, flags in {"sglang": ("--attention-backend", "torch_native"), "atom": ("--model-impl", "atom")}.items():
        with serve(MOE, *flags, "--dtype", "bfloat16", folder=tmp_path / name) as server:
            found[name] = checks.prefill_differences(server, "moe", checks.solved("moe", 200))
            print(f"bf16 {name}: {found[name]} p99 {found[name].quantile(0.99):.2e}")
    assert found["atom"].mean <= 1.25 * found["sglang"].mean
    assert found["atom"].quantile(0.99) <= 1.25 * found["sglang"].quantile(0.99)


def test_calibrated_fp8_cache(tmp_path: Path) -> None:
    """k_scale and v_scale of a checkpoint reach the layers, and an FP8 cache with them stays near the fp32 one."""
    folder = tmp_path / "model"
    shutil.copytree(MOE, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(4):
        for part, scale in (("k", 0.25), ("v", 0.0625)):
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sequences = checks.solved("moe", 50)
    with serve(folder, *ATOM, "--kv-cache-dtype", "fp8_e4m3", folder=tmp_path / "run") as server:
        (rank,) = server.ranks()
        assert rank["kv_cache_dtype"] == "torch.float8_e4m3fn"
        assert rank["kv_scales"] == [[0.25, 0.0625]] * 4
        found = checks.prefill_differences(server, "moe", sequences)
    print(f"fp8 cache: {found}")
    assert 1e-4 < found.mean < 0.15, "an FP8 cache rounds, and no more than that"
