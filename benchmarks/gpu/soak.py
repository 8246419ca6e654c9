"""Minutes of a crowded server: mixed lengths, clients that go away, retractions, and a probe that must not change.

    PYTHONPATH=. python benchmarks/gpu/soak.py [--minutes 10] [--concurrency 64] [--model FOLDER] [--out FILE]
        [--max-total-tokens 12288] [--longest-prompt 1000] [--longest-answer 800] [-- more launch flags]

Launches ``--model-impl atom`` with a KV pool that is too small for its clients, so that SGLang retracts requests. Every
client sends one request after the other: most are answered, of the rest some close their stream and some are aborted by
id. Half a question is asked all the while: alone, at the beginning and the end, with nothing cached, its greedy answer
and all logprobs must be the same to the bit. In the crowd bf16 depends on the batch, and swaps an expert now and then:
there the logprobs of one answer may differ by 0.3 in the mean, those of all by 0.05, and two tokens that are swapped by
2 nats; another request's keys make much more. Afterwards the server must be idle, SGLang's own check must have
found no slot leaked, and nothing may have crashed; retractions and aborts must have happened. Writes
benchmarks/results/soak.json; exit status 1 with what is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import requests
from steps import REPO, gpu_gib, write_results

from atom_plugin.compare import servers
from atom_plugin.compare.processes import Command
from tests.plugin_folder import make_plugin

TINY = REPO / "examples" / "tiny-qwen3-moe"
#: Nats: between tokens that are swapped, mean of one probe's logprobs, mean of all probes' in the crowd.
NEAR_TIE, PROBE_APART, MEAN_APART = 2.0, 0.3, 0.05
#: Token ids of the clients' prompts; every tokenizer has so many.
VOCAB = 600
PROBE_EVERY, ROW_EVERY = 3.0, 10.0
#: What SGLang logs once it serves, and what no log of a healthy server holds after it.
IS_UP = "The server is fired up"
CRASHES = re.compile(r"memory leak detected|Traceback \(most recent call last\)|CUDA error|Scheduler hit an exception")


class Probe:
    """Half a word problem, of whose next words no model is sure, and how far its answers are from the first."""

    def __init__(self, server: servers.Server) -> None:
        self._server = server
        question = json.loads((TINY / "heldout.jsonl").read_text().splitlines()[0])["question"]
        self._prompt = f"Question: {question[: len(question) // 2]}"
        self.first = self.ask()

    def ask(self) -> dict[str, Any]:
        """Return prompt logprobs, answer tokens, their logprobs and likeliest tokens, none of it from the cache."""
        body = {
            "text": self._prompt, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5,
            "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True},
        }  # fmt: skip
        found = self._server.ask("/generate", body)["meta_info"]
        return {
            "prompt": [entry[0] for entry in found["input_token_logprobs"][1:]],
            "tokens": [entry[1] for entry in found["output_token_logprobs"]],
            "answer": [entry[0] for entry in found["output_token_logprobs"]],
            "likeliest": [[entry[:2] for entry in step] for step in found["output_top_logprobs"]],
        }

    def ask_alone(self) -> None:
        """Ask three times with an empty cache and nobody else; AssertionError where anything differs from the first."""
        for _ in range(3):
            flush(self._server)
            now = self.ask()
            assert now == self.first, f"alone, the probe is {now}, and was {self.first}"

    def ask_in_a_crowd(self) -> dict[str, float]:
        """Return the mean and largest difference of logprobs and the gap where tokens part (0 where none do)."""
        now, gap = self.ask(), 0.0
        pairs = zip(self.first["tokens"], now["tokens"], strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(now["tokens"]))
        if same < len(now["tokens"]):
            listed = {token: logprob for logprob, token in self.first["likeliest"][same]}
            gap = self.first["answer"][same] - listed.get(now["tokens"][same], -1e9)
        before = self.first["prompt"] + self.first["answer"][:same]
        found = [abs(a - b) for a, b in zip(before, now["prompt"] + now["answer"][:same], strict=True)]
        return {"mean": sum(found) / len(found), "max": max(found), "gap": gap}


class Crowd:
    """Clients in threads of their own, until ``stop``; ``counts`` says how their requests ended."""

    def __init__(self, url: str, *, concurrency: int, longest_prompt: int, longest_answer: int) -> None:
        self._url, self._stop = url, threading.Event()
        self._longest_prompt, self._longest_answer = longest_prompt, longest_answer
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._client, args=(seed,)) for seed in range(concurrency)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let every client finish its request."""
        self._stop.set()
        for thread in self._threads:
            thread.join(600)
        assert not any(thread.is_alive() for thread in self._threads), "clients wait for answers that do not come"

    def _client(self, seed: int) -> None:
        draw, of_four = random.Random(seed), random.Random(-1 - seed % 4)
        shared = [of_four.randrange(2, VOCAB) for _ in range(self._longest_prompt)]
        number = 0
        while not self._stop.is_set():
            number += 1
            new = [draw.randrange(2, VOCAB) for _ in range(draw.choice((1, 7, 60, self._longest_prompt // 4)))]
            ids = shared[: draw.choice((0, 33, self._longest_prompt // 3, self._longest_prompt * 3 // 4))] + new
            sampling = {
                "temperature": draw.choice((0, 1)), "ignore_eos": True,
                "max_new_tokens": draw.randrange(1, self._longest_answer + 1),
            }  # fmt: skip
            body = {"rid": f"soak-{seed}-{number}", "input_ids": ids, "sampling_params": sampling}
            how = draw.choices((self._answered, self._closed, self._aborted), (8, 1, 1))[0]
            try:
                how(body, draw)
            except (requests.RequestException, KeyError, AssertionError) as error:
                self.failures.append(f"{how.__name__} {body['rid']}: {error}"[:500])
                return

    def _answered(self, body: dict[str, Any], draw: random.Random) -> None:
        answer = requests.post(f"{self._url}/generate", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        found = answer.json()["meta_info"]
        assert found["completion_tokens"] == body["sampling_params"]["max_new_tokens"], found
        self.counts["answered"] += 1

    def _closed(self, body: dict[str, Any], draw: random.Random) -> None:
        body["sampling_params"]["max_new_tokens"] = self._longest_answer
        with requests.post(f"{self._url}/generate", json={**body, "stream": True}, stream=True, timeout=600) as answer:
            assert answer.status_code == 200, answer.text
            for _ in zip(range(draw.randrange(1, 9)), answer.iter_lines(), strict=False):
                pass
        self.counts["closed"] += 1

    def _aborted(self, body: dict[str, Any], draw: random.Random) -> None:
        wait = draw.random()
        asked = {"url": f"{self._url}/abort_request", "json": {"rid": body["rid"]}, "timeout": 60}
        timer = threading.Timer(wait, requests.post, kwargs=asked)  # where it fails, nothing counts as aborted
        timer.start()
        answer = requests.post(f"{self._url}/generate", json=body, timeout=600)
        timer.join()
        assert answer.status_code in (200, 400, 503), answer.text
        # one that was still waiting has no answer: SGLang says 400 or 503 to it
        reason = answer.json()["meta_info"]["finish_reason"]["type"] if answer.status_code == 200 else "abort"
        self.counts["aborted" if reason == "abort" else "answered before its abort"] += 1


def flush(server: servers.Server) -> None:
    """Empty the radix cache, once the server is idle."""
    deadline = time.monotonic() + 120
    while requests.post(f"{server.url}/flush_cache", timeout=30).status_code != 200:
        server.check()
        assert time.monotonic() < deadline, "two minutes after the last request the server is not idle"
        time.sleep(0.2)


def metrics(url: str) -> dict[str, float]:
    """Return what SGLang counts: a metric's name without its prefix -> the sum over labels."""
    sums: Counter[str] = Counter()
    for line in requests.get(f"{url}/metrics", timeout=30).text.splitlines():
        if line.startswith("sglang:"):
            name, value = line.removeprefix("sglang:").rsplit(" ", 1)
            sums[name.split("{")[0]] += float(value)
    return sums


def memory(server: servers.Server) -> dict[str, float | None]:
    """Return the GiB that the server's processes hold of main memory, and those in use on the GPU."""
    assert server.process is not None
    whole = psutil.Process(server.process.pid)
    held = 0.0
    for one in (whole, *whole.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # a compiler that has just ended
            held += one.memory_info().rss / 2**30
    return {"rss_gib": held, "gpu_gib": gpu_gib()}


def row(server: servers.Server, seconds: float, probes: list[dict[str, float]]) -> dict[str, Any]:
    """Return and print where the server stands, and the worst of the probes since the last row."""
    found = metrics(server.url)
    told = {
        "seconds": seconds, "running": found["num_running_reqs"], "queued": found["num_queue_reqs"],
        "usage": found["token_usage"], "retracted": found["num_retracted_requests_total"],
        "aborted": found["num_aborted_requests_total"], "probes": len(probes),
        "probe_mean": sum(one["mean"] for one in probes) / max(1, len(probes)),
        "probe_worst": max((one["mean"] for one in probes), default=0.0),
        "probe_gap": max((one["gap"] for one in probes), default=0.0), **memory(server),
    }  # fmt: skip
    print(" ".join(f"{name} {value:.4g}" for name, value in told.items() if value is not None), flush=True)
    return told


def crowd_it(server: servers.Server, probe: Probe, arguments: argparse.Namespace) -> tuple[list[Any], Crowd]:
    """Send clients for so many minutes and return (a row each ten seconds, how the clients fared)."""
    crowd = Crowd(
        server.url, concurrency=arguments.concurrency, longest_prompt=arguments.longest_prompt,
        longest_answer=arguments.longest_answer,
    )  # fmt: skip
    start = time.monotonic()
    rows, probes = [], []
    try:
        while time.monotonic() < start + 60 * arguments.minutes:
            server.check()
            probes.append(probe.ask_in_a_crowd())
            if time.monotonic() > start + ROW_EVERY * (len(rows) + 1):
                rows.append(row(server, time.monotonic() - start, probes))
                probes = []
            time.sleep(PROBE_EVERY)
        rows.append(row(server, time.monotonic() - start, probes))
    finally:
        crowd.stop()
    return rows, crowd


def idle_check(report: Path) -> dict[str, Any]:
    """Return what SGLang's check of an idle server said, after a time at which nobody asked it for anything."""
    since, deadline = time.time(), time.monotonic() + 60
    while time.monotonic() < deadline:
        found: dict[str, Any] = json.loads(report.read_text()) if report.is_file() else {"time": 0.0}
        if found["time"] > since:
            return found
        time.sleep(0.2)
    raise AssertionError("SGLang has not looked for leaked slots in a minute, so the server was not idle")


def launch(arguments: argparse.Namespace, folder: Path, port: int) -> Command:
    """Return the launch, with the plugin that notes SGLang's checks in ``folder``/idle.json."""
    site = make_plugin(folder / "site", "atom_idle_probe", "idle_probe:register")
    path = [str(site), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(arguments.model), "--port", str(port)]
    words += ["--host", servers.HOST, "--model-impl", "atom", "--dtype", "bfloat16", "--enable-metrics"]
    words += ["--log-level", "info", "--max-total-tokens", str(arguments.max_total_tokens), *arguments.flags]
    environment = {"PYTHONPATH": os.pathsep.join(path), "ATOM_IDLE_REPORT": str(folder / "idle.json")}
    return Command(tuple(words), {**environment, "HF_HUB_OFFLINE": "1"})


def soak(arguments: argparse.Namespace) -> tuple[list[Any], Crowd, dict[str, Any], str]:
    """Return (rows, how the clients fared, memory and the idle check, the server's log); AssertionError for a fault."""
    port = servers.choose_port(None)
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder, told = Path(made), {}
        if arguments.log:
            stack.callback(lambda: shutil.copy(folder / "server-1.log", arguments.log))
        server = stack.enter_context(
            servers.serve(
                launch(arguments, folder, port), name="atom", port=port, folder=folder, start_seconds=400,
                show=lambda line: None,
            )
        )  # fmt: skip
        flush(server)
        probe = Probe(server)
        probe.ask_alone()
        idle_check(folder / "idle.json")  # now, rather than after minutes, where it does not come at all
        told["memory_before"] = memory(server)
        rows, crowd = crowd_it(server, probe, arguments)
        told["idle_check"] = idle_check(folder / "idle.json")  # before a flush, which makes every slot free
        probe.ask_alone()
        idle_check(folder / "idle.json")
        told["memory_after"] = memory(server)
        assert server.log is not None
        return rows, crowd, told, server.log.read_text(errors="replace")


def wrong(rows: list[Any], crowd: Crowd, idle: Mapping[str, Any], log: str) -> list[str]:
    """Return all that a soak must not show."""
    retracted, aborted = rows[-1]["retracted"], crowd.counts["aborted"]
    worst, gap = (max(one[name] for one in rows) for name in ("probe_worst", "probe_gap"))
    apart = sum(one["probe_mean"] * one["probes"] for one in rows) / sum(one["probes"] for one in rows)
    crash = CRASHES.search(log.split(IS_UP)[-1])
    found = {
        f"{len(crowd.failures)} requests failed: {crowd.failures[:3]}": bool(crowd.failures),
        "nothing was retracted: give a smaller --max-total-tokens": retracted == 0,
        "nothing was aborted": aborted == 0 or crowd.counts["closed"] == 0,
        f"in the crowd a probe's logprobs differ by {worst:.2e} in the mean": worst > PROBE_APART,
        f"in the crowd all probes' logprobs differ by {apart:.2e} in the mean": apart > MEAN_APART,
        f"in the crowd the probe's tokens part {gap:.2f} nats from a tie": gap > NEAR_TIE,
        f"slots leaked: {idle}": idle["leak"],
        f"the log holds {crash.group() if crash else ''!r}": crash is not None,
    }
    return [what for what, is_so in found.items() if is_so]


def main() -> None:
    """Run the soak and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--max-total-tokens", type=int, default=12288)
    parser.add_argument("--longest-prompt", type=int, default=1000)
    parser.add_argument("--longest-answer", type=int, default=800)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/soak.json")
    parser.add_argument("--log", type=Path, help="where the server's log is kept, otherwise nowhere")
    parser.add_argument("flags", nargs="*", help="of the launch, after --")
    arguments = parser.parse_args()
    rows, crowd, told, log = soak(arguments)
    found = wrong(rows, crowd, told["idle_check"], log)
    retractions = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log)))
    told |= {"requests": dict(crowd.counts), "retractions_logged": retractions, "wrong": found}
    print(json.dumps(told, indent=1))
    write_results("soak", rows, out=arguments.out, **told)
    if found:
        sys.exit("; ".join(found))


if __name__ == "__main__":
    main()
