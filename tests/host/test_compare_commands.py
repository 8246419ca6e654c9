"""What compare asks of SGLang's programs and servers by name is in the wheels at both ends and in the middle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from atom_plugin import host
from atom_plugin.compare import few_shot, measuring, speed
from atom_plugin.compare.servers import Server
from atom_plugin.recipe import Speed
from tests.host.wheel_source import WheelSource
from tests.wheels import unpacked


@pytest.fixture(params=host.TESTED_SGLANG)
def wheel(request: pytest.FixtureRequest) -> WheelSource:
    return WheelSource(unpacked(f"sglang=={request.param}"))


def strings(wheel: WheelSource, module: str) -> set[str]:
    """Return every string of a module."""
    tree = wheel.tree(module)
    assert tree is not None, f"{module} is not there"
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_the_benchmark_has_every_flag_and_figure(wheel: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "ask", lambda self, path: {"tokenizer_path": "t", "data": [{"id": "m"}]})
    words = speed.command(
        Speed(), speed.Cell(8, 4, 2), 0, server=Server("a", "http://h:1"), output=Path("x.jsonl")
    ).words
    known = strings(wheel, "sglang.benchmark.serving")
    assert words[1:3] == ("-m", "sglang.benchmark.serving")
    assert not [word for word in words if word.startswith("--") and word not in known]
    assert {"random-ids", "completed", "errors", *speed.LATENCIES.values(), *speed.THROUGHPUTS.values()} <= known


def test_the_few_shot_benchmark_has_every_argument_and_figure(wheel: WheelSource) -> None:
    known = strings(wheel, "sglang.test.few_shot_gsm8k")
    assert {few_shot.DUMP, "accuracy", "invalid", "latency", "output_throughput"} <= known
    assert {"--num-shots", "--data-path", "--num-questions", "--max-new-tokens", "--parallel", "--host"} <= known


def test_a_server_says_of_itself_what_the_report_shows(wheel: WheelSource) -> None:
    (args,) = [one for one in wheel.find("sglang.srt.server_args", "ServerArgs") if isinstance(one.node, ast.ClassDef)]
    fields = wheel.fields("sglang.srt.arg_groups.fields") | wheel.fields(args.module)
    assert not {*measuring.SHOWN_OF_SERVER, "tokenizer_path", "model_path"} - fields - {"version"}
    assert {"/server_info", "/health", "/v1/models", "/generate"} <= strings(
        wheel, "sglang.srt.entrypoints.http_server"
    )
