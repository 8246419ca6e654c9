"""Decode graphs on a CPU for end-to-end tests: the environment of a server, and what its graphs did."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tests.plugin_folder import make_plugin

PLUGIN = Path(__file__).parent / "plugin"
REPORT = "CPU_GRAPH_REPORT"


@dataclass(frozen=True)
class GraphReport:
    """What the graphs of a server did.

    ``moved``: what replays read at another address than at capture, where a real graph would have gone on reading the
    old one; ``resized``: what they read in another shape, as only a row that looks at lengths on the host can.
    """

    captured: list[str]
    num_replays: int
    moved: list[str]
    resized: list[str]


def cpu_graph_env(tmp_path: Path) -> dict[str, str]:
    """Return environment variables for a server (or Engine) that captures and replays decode graphs on the CPU.

    The server needs our CPU platform and a backend with graph methods; `--cuda-graph-max-bs-decode 4` keeps capture
    short. SGLANG_PLUGINS must let ``cpu_graph`` through. ``read_report`` tells what happened.
    """
    make_plugin(tmp_path, "cpu_graph", "cpu_graph_plugin:register")
    path = [str(tmp_path), str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), REPORT: str(tmp_path / "cpu_graph.jsonl")}


def read_report(env: dict[str, str]) -> GraphReport:
    """Return what the graphs of the server started with ``env`` did so far."""
    report = Path(env[REPORT])
    events = [json.loads(line) for line in report.read_text().splitlines()] if report.is_file() else []
    replays = [event for event in events if event["event"] == "replay"]
    return GraphReport(
        captured=[event["graph"] for event in events if event["event"] == "capture"],
        num_replays=len(replays),
        moved=[read for event in replays for read in event["moved"]],
        resized=[read for event in replays for read in event["resized"]],
    )
