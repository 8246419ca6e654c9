"""Checks launches as SGLang's main process does, many in one process: reads cases as JSON, prints outcome by name.

A case is [name, [flags]]; the outcome is the refusal's message, "served", or "other: ..." for SGLang's own error.
"""

from __future__ import annotations

import json
import sys
import traceback


def main() -> None:
    """Run every case of standard input."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    load_plugins()
    from sglang.srt.platforms import current_platform

    from atom_plugin.register import LaunchRefused

    # or SGLang would refuse speculation on our CPU platform itself, from 0.5.23 on, before we are asked
    type(current_platform).supports_speculative_algorithm = lambda platform, algorithm: True

    outcomes = {}
    for name, flags in json.load(sys.stdin):
        try:
            args = prepare_server_args([*flags, "--device", "cpu", "--max-total-tokens", "2048"])
            if "resolve_once" in vars(ServerArgs):
                args.resolve_once()
            args.check_server_args()
            outcomes[name] = "served"
        except LaunchRefused as refusal:
            outcomes[name] = str(refusal)
        except (ValueError, AssertionError, NotImplementedError, RuntimeError, OSError, TypeError, KeyError) as error:
            traceback.print_exc()
            outcomes[name] = f"other: {type(error).__name__}: {error}"
    print("\nOUTCOMES" + json.dumps(outcomes))


if __name__ == "__main__":
    main()
