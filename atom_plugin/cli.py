"""atom-plugin: the command line beside the server."""

from __future__ import annotations

import argparse
import runpy
import sys

from atom_plugin import doctor, register


def main(argv: list[str] | None = None) -> int:
    """Run ``atom-plugin`` with ``argv`` (default: the process's) and return its exit status."""
    parser = argparse.ArgumentParser(prog="atom-plugin", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("doctor", help="check versions, entry points, machine and hooks; exit 1 on a fault")
    command.add_argument("--json", action="store_true", help="machine-readable findings")
    command = commands.add_parser("bench", help="run an SGLang benchmark that does not load plugins by itself")
    command.add_argument("module", help="e.g. sglang.bench_one_batch")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    arguments = parser.parse_args(argv)
    if arguments.command == "bench":
        return bench(arguments.module, arguments.arguments)
    findings = doctor.examine()
    print(doctor.report(findings, as_json=arguments.json))
    return int(any(finding.remedy for finding in findings))


def bench(module: str, arguments: list[str]) -> int:
    """Run ``module`` as a script with our model and backend known to SGLang.

    SGLang's one-process benchmarks parse their flags and build a model without loading plugins: `--model-impl atom`
    would silently measure SGLang's own model there.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if not register.complete:
        print("atom-plugin failed to load; `atom-plugin doctor` says why", file=sys.stderr)
        return 1
    register.prepare_serving()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
