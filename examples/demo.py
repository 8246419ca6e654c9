"""Serve the tiny Qwen3-MoE with `--model-impl atom`, ask one question, print the answer, stop.

Runs on any machine with SGLang and this package; without an accelerator on the package's CPU platform.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

MODEL = Path(__file__).parent / "tiny-qwen3-moe"
URL = "http://127.0.0.1:30817"
QUESTION = (
    "Lily has 99 coins. She buys 79 more coins and then gives 52 coins to Kevin. How many coins does Lily have left?"
)


def call(path: str, body: dict[str, object] | None = None) -> dict[str, object] | None:
    """Return the JSON of one request, None while nothing answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
            return json.loads(text) if text else {}
    except (urllib.error.URLError, ConnectionError):
        return None


def main() -> int:
    """Start the server as the README does, ask, and stop it."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(MODEL), "--model-impl", "atom"]
    command += ["--host", "127.0.0.1", "--port", URL.rsplit(":", 1)[1], "--mem-fraction-static", "0.2"]
    command += ["--max-total-tokens", "16384", "--skip-server-warmup"]
    if subprocess.run([sys.executable, "-c", "import torch, sys; sys.exit(torch.cuda.is_available())"]).returncode == 0:
        command += ["--device", "cpu"]
    print("+", " ".join(command), flush=True)
    server = subprocess.Popen(command)
    try:
        while call("/health") is None:
            if server.poll() is not None:
                return 1
            time.sleep(0.5)
        prompt = {"text": f"Question: {QUESTION}\nAnswer:", "sampling_params": {"temperature": 0, "max_new_tokens": 96}}
        answer = call("/generate", prompt)
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
    print(f"\nQuestion: {QUESTION}\nAnswer:{(answer or {}).get('text')}")
    return 0 if answer else 1


if __name__ == "__main__":
    sys.exit(main())
