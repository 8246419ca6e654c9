"""``atom-plugin explain`` of MLA: a row for each attention layer and mode, none from where AITER aborts or is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom_plugin import cli
from atom_plugin.configs import load_spec
from atom_plugin.explain import Choice, Plan, explain

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf_configs"
K2, K3, LINEAR = (
    CONFIGS / f"moonshotai--{name}.json" for name in ("Kimi-K2-Instruct", "Kimi-K3", "Kimi-Linear-48B-A3B-Instruct")
)
DECODE = "aiter_mla_decode_fwd"
ONE = {"store_kv", "mla_attention decode", "mla_attention decode in a graph"}
UNABSORBED = {"paged_attention extend", "paged_attention extend lse", "paged_attention chunk of prefixes lse"}


def choices(model: Path, **plan: object) -> dict[str, Choice]:
    return {choice.mode: choice for choice in explain(load_spec(model), Plan(**{"tp": 8, **plan}))}  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [K2, K3], ids=["K2: 8 heads", "K3: 12 heads"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("query_len", [1, 8])
def test_every_mode_has_a_row(model: Path, arch: str, query_len: int) -> None:
    """The cells that issue 5 names: fp8 KV at TP 8, by query length."""
    found = choices(model, arch=arch, kv_cache_dtype="fp8_e4m3", query_len=query_len)
    if model == K2:  # our model's own op; K3's is SGLang's
        assert found.pop("latent_norm_rope").row == "triton"
        experts = found.pop("few_token_experts")
        assert experts.row == "sglang" and any("quantised" in reason for reason in experts.refused["triton"])
    verify = {"mla_attention verify of 8", "mla_attention verify of 8 in a graph", "mla_attention extend"}
    assert found.keys() == (ONE if query_len == 1 else {"store_kv", *verify, *UNABSORBED})
    rows = {mode: choice.row for mode, choice in found.items()}
    if query_len == 1:
        assert rows == {"store_kv": "triton"} | dict.fromkeys(ONE - {"store_kv"}, DECODE)
    else:  # its float8 kernels take 4 queries a request
        assert set(rows.values()) == {"triton"}
        reasons = found["mla_attention verify of 8"].refused[DECODE]
        assert any("8 queries a request" in reason and "takes up to 4" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("plan", "row"),
    [
        ({"arch": "gfx942", "query_len": 4}, DECODE),
        ({"arch": "gfx942", "query_len": 8}, "triton"),  # 5 and more without metadata are wrong: ROCm/aiter #5679
        ({"arch": "gfx950", "query_len": 8}, DECODE),
        ({"arch": "gfx950", "query_len": 16}, "triton"),
        ({"arch": "sm90", "query_len": 8}, "triton"),
        ({"arch": "cpu", "query_len": 8}, "eager"),
        ({"arch": "gfx950", "query_len": 8, "page_size": 64}, DECODE),
    ],
)
def test_verify_of_a_bfloat16_cache(plan: dict[str, object], row: str) -> None:
    found = choices(K2, **plan)
    for mode in ("", " in a graph"):
        assert found[f"mla_attention verify of {plan['query_len']}{mode}"].row == row
    assert found["mla_attention extend"].row in ("triton", "eager"), "AITER takes equal numbers of queries"


def test_without_a_query_length_no_verify_is_shown() -> None:
    assert choices(K2, arch="sm90").keys() == {
        *ONE, "few_token_experts", "latent_norm_rope", "mla_attention extend", *UNABSORBED
    }  # fmt: skip


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(K2), "--arch", "gfx950", "--tp", "8"]) == 0
    text = capsys.readouterr().out
    assert "attention TP 8: layers 0 to 60 have 8 query heads a rank over latent rows of 512 + 64, bfloat16" in text
    assert "SGLang's own model" not in text
    assert cli.main(["explain", str(LINEAR), "--arch", "gfx942", "--tp", "8"]) == 0
    text = capsys.readouterr().out
    assert "(SGLang's own model, with --attention-backend atom) on gfx942" in text
    assert "layers 3, 7, 11, 15, 19, 23, 26 have 4 query heads a rank" in text
    assert "(the others are KDA, which SGLang runs)" in text
    assert cli.main(["explain", str(K2), "--arch", "gfx950", "--tp", "3"]) == 2
    assert "--tp 3 does not divide 64 query heads" in capsys.readouterr().err
