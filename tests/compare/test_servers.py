"""Servers are found dead at once, with the reason from their log, and none is left behind."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from atom_plugin.compare import processes, servers
from atom_plugin.compare.failure import MeasureError, last_error
from atom_plugin.compare.processes import Command
from atom_plugin.recipe import Recipe, Variant

FAKE = Path(__file__).parent / "fake_server.py"


def silent(line: str) -> None:
    """Show nothing."""


def running_fakes() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if str(FAKE) in (one.info["cmdline"] or [])]


def serve(tmp_path: Path, how: str, *, start_seconds: float = 30) -> object:
    port = servers.choose_port(None)
    command = Command((sys.executable, str(FAKE), str(port), how), {})
    return servers.serve(command, name="atom", port=port, folder=tmp_path, start_seconds=start_seconds, show=silent)


def test_it_answers_and_is_stopped(tmp_path: Path) -> None:
    with serve(tmp_path, "serve") as server:
        assert server.model() == "tiny"
        assert running_fakes()
    assert not running_fakes()


def test_one_that_ends_while_it_starts_is_told_with_its_reason(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(MeasureError) as raised, serve(tmp_path, "refuse"):
        pass
    assert "the server atom ended (exit status 1)" in str(raised.value)
    assert "--tp-size 3 does not divide 4 heads" in str(raised.value) and "server-1.log" in str(raised.value)
    assert time.monotonic() - begin < 10


def test_one_that_never_answers_is_stopped(tmp_path: Path) -> None:
    with (
        pytest.raises(MeasureError, match=r"did not answer within 1 s \(--start-timeout\)"),
        serve(tmp_path, "hang", start_seconds=1),
    ):
        pass
    assert not running_fakes()


def test_one_that_dies_when_asked_is_told_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(MeasureError) as raised, serve(tmp_path, "die") as server:
        server.ask("/server_info")
    assert "ended (exit status 9)" in str(raised.value) and "out of memory in layer 3" in str(raised.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MeasureError])
def test_whatever_ends_the_block_the_whole_family_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    monkeypatch.setattr(processes, "STOP_SECONDS", 2.0)
    with pytest.raises(error), serve(tmp_path, "stubborn"):
        assert len(running_fakes()) == 2
        raise error()
    assert not running_fakes()


class Gone:
    """A server that has died, or is about to."""

    def __init__(self, *, already: bool) -> None:
        self.already = already

    def check(self) -> None:
        if self.already:
            raise MeasureError("the server died")

    def check_after_failure(self) -> None:
        raise MeasureError("the server died")


FAILING = Command((sys.executable, "-c", "print('0%|   |\\r5%|   |'); raise ValueError('no such split')"), {})


def test_a_harness_is_ended_when_its_server_dies(tmp_path: Path) -> None:
    sleeper = Command((sys.executable, str(FAKE), "0", "hang"), {})
    with pytest.raises(MeasureError, match="the server died"):
        processes.run_watched(sleeper, tmp_path / "log", folder=tmp_path, watched=Gone(already=True), show=silent)
    assert not running_fakes()


def test_a_harness_that_fails_is_told_with_its_last_error(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"ValueError: no such split\n\(exit status 1; the whole log: .*log\)"):
        processes.run_watched(FAILING, tmp_path / "log", folder=tmp_path, watched=None, show=silent)


def test_a_harness_that_fails_by_a_dying_server_is_told_by_that(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="the server died"):
        processes.run_watched(FAILING, tmp_path / "log", folder=tmp_path, watched=Gone(already=False), show=silent)


def test_a_server_that_no_longer_answers_is_told(tmp_path: Path) -> None:
    gone = servers.Server("atom", f"http://127.0.0.1:{servers.choose_port(None)}")
    with pytest.raises(MeasureError, match="the server atom no longer answers"):
        gone.ask("/server_info")


def test_a_taken_port_is_refused_before_any_launch() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MeasureError, match=f"port {port} is taken"):
            servers.choose_port(port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(MeasureError, match=rf"--port {port}: 1 to 65535 is accepted"):
        servers.choose_port(port)


def test_a_url_without_a_server() -> None:
    port = servers.choose_port(None)
    with pytest.raises(MeasureError, match="is an SGLang server running there"):
        servers.running("atom", f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("flag", ["--port=3", "--model-path", "--host"])
def test_flags_that_compare_sets_itself_are_refused(flag: str) -> None:
    recipe = Recipe(title="", model="m", shared=("--tp-size", "2"), variants={"a": Variant(flags=(flag, "x"))})
    assert f"{flag.partition('=')[0]} is among the launch flags" in servers.why_not_flags(recipe)


@pytest.mark.parametrize("flags", [("--log-level", "warning"), ("--log-level=error",)])
def test_a_log_that_would_not_say_what_is_served_is_refused(flags: tuple[str, ...]) -> None:
    recipe = Recipe(title="", model="m", shared=("--tp-size", "2"), variants={"a": Variant(flags=flags)})
    assert "a server says which model it serves at info or debug" in servers.why_not_flags(recipe)
    at_info = Recipe(title="", model="m", shared=("--log-level", "info"), variants={"a": Variant(flags=("x",))})
    assert servers.why_not_flags(at_info) == ""


def test_a_command_line_reads_as_typed() -> None:
    variant = Variant(flags=("--json-model-override-args", '{"rope_theta": 5}'), environment={"A": "1"})
    recipe = Recipe(title="", model="m", shared=("--tp-size", "2"), environment={"B": "x y"}, variants={"a": variant})
    shown = str(servers.launch_command(recipe, "a", 30000))
    assert shown.startswith("'B=x y' A=1 ") and shown.endswith("--json-model-override-args '{\"rope_theta\": 5}'")


def test_last_error_is_the_last_one_and_falls_back_to_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: first\n  at x\n[2026-01-01 00:00:00] RuntimeError: second\nbye\n")
    assert last_error(log) == "[2026-01-01 00:00:00] RuntimeError: second\nbye"
    log.write_text("ConnectionError: not yet\n[now] The server is fired up and ready to roll!\nGET /health\n")
    assert last_error(log) == "GET /health"
    log.write_text("\n".join(f"line {i}" for i in range(20)))
    assert last_error(log).splitlines() == [f"line {i}" for i in range(14, 20)]
    log.write_text("")
    assert last_error(log) == "(the log is empty)"


def test_loopback_is_not_asked_through_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at the proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "example.org")
    with pytest.raises(MeasureError, match="did not answer"), serve(tmp_path, "serve", start_seconds=2):
        pass
    servers.reach_loopback_directly()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    with serve(tmp_path, "serve") as server:
        assert server.model() == "tiny"
    monkeypatch.setenv("no_proxy", "*")
    servers.reach_loopback_directly()
    assert os.environ["no_proxy"] == "*"


def test_servers_that_run_already_have_no_flags() -> None:
    recipe = Recipe(title="", model="", variants={name: Variant(flags=()) for name in ("one", "other")})
    assert servers.why_not_flags(recipe) == ""
