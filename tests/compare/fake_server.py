"""A stand-in for a server process: ``fake_server.py PORT HOW``.

``HOW``: ``serve`` answers, ``refuse`` prints an error and ends, ``hang`` never answers, ``die`` ends as an answer is
asked for, ``stubborn`` answers, ignores SIGTERM, and has a child that does so too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

PORT, HOW = int(sys.argv[1]), sys.argv[2]


class Handler(BaseHTTPRequestHandler):
    """Answers /health and, with JSON, everything else."""

    def do_GET(self) -> None:
        if self.path != "/health" and HOW == "die":
            print("RuntimeError: out of memory in layer 3", flush=True)
            os._exit(9)
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if HOW == "refuse":
    print("loading\natom-plugin cannot serve this launch:\n  - --tp-size 3 does not divide 4 heads", flush=True)
    sys.exit(1)
if HOW in ("stubborn", "child"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if HOW == "stubborn":
    subprocess.Popen([sys.executable, __file__, "0", "child"])
if HOW in ("hang", "child"):
    time.sleep(600)
HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
