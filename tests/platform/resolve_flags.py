"""What SGLang makes of flags on our platform; run by test_server_args.py.

Usage: resolve_flags.py MODEL JSON, where JSON is a list of ServerArgs keyword arguments. Prints, as the last line, a
list of [max_total_tokens, SGLANG_CPU_OMP_THREADS_BIND or null, device].
"""

from __future__ import annotations

import json
import logging
import os
import sys

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    from atom_plugin import host
    from atom_plugin.cpu import threads

    results = []
    for flags in json.loads(sys.argv[2]):
        server_args = ServerArgs(model_path=sys.argv[1], load_format="dummy", **flags)
        if host.since("0.5.19"):
            server_args.resolve_once()
        cfg = host.resolved(server_args)
        results.append([cfg.max_total_tokens, os.environ.get(threads.BIND), cfg.device])
    print(json.dumps(results))
