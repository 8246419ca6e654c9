"""atom-plugin: the command line beside the server."""

from __future__ import annotations

import argparse
import sys

from atom_plugin import doctor
from atom_plugin.compare import arguments as compare_arguments
from atom_plugin.compare.failure import MeasureError
from atom_plugin.recipe import RecipeError

ARCHS = ("gfx942", "gfx950", "sm90", "cpu")
DTYPES = ("bfloat16", "float16", "float32")


def main(argv: list[str] | None = None) -> int:
    """Run ``atom-plugin`` with ``argv`` (default: the process's) and return its exit status."""
    parser = argparse.ArgumentParser(prog="atom-plugin", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("doctor", help="check versions, entry points, machine and hooks; exit 1 on a fault")
    command.add_argument("--json", action="store_true", help="machine-readable findings")
    _add_explain(commands.add_parser("explain", help="print which kernels a model gets; exit 1 where there is none"))
    comparison = commands.add_parser("compare", help="accuracy, agreement and speed of two variants; exit 1 if worse")
    compare_arguments.add_arguments(comparison)
    ours, flags = compare_arguments.split_flags(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(ours)
    if arguments.command == "compare":
        return _compare(arguments, flags)
    if arguments.command == "explain":
        return _explain(arguments)
    findings = doctor.examine()
    print(doctor.report(findings, as_json=arguments.json))
    return int(any(finding.remedy for finding in findings))


def _add_explain(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="folder of a checkpoint, or its config.json; weights are not needed")
    command.add_argument("--arch", required=True, choices=ARCHS, help="of the machine")
    command.add_argument("--tp", type=int, default=1, help="ranks that share the attention heads")
    command.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    command.add_argument("--kv-cache-dtype", default="auto", help="as the server's flag")
    command.add_argument("--page-size", type=int, default=1, help="tokens")
    command.add_argument("--query-len", type=int, help="new tokens a request: 1 for decode; default: every mode")
    command.add_argument("--aiter", default="main", choices=["wheel", "main", "here"], help="version on the machine")
    command.add_argument("--why", action="store_true", help="every refused row with its reasons")
    command.add_argument("--json", action="store_true", help="machine-readable choices")


def _explain(arguments: argparse.Namespace) -> int:
    from atom_plugin import explain  # torch, which doctor has to report as missing
    from atom_plugin.configs import ConfigError

    plan = explain.Plan(
        arch=arguments.arch,
        tp=arguments.tp,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        page_size=arguments.page_size,
        query_len=arguments.query_len,
        aiter=arguments.aiter,
    )
    try:
        text, served = explain.report(arguments.model, plan, why=arguments.why, as_json=arguments.json)
    except (ConfigError, ValueError) as error:
        print(f"atom-plugin explain: {error}", file=sys.stderr)
        return 2
    print(text)
    return int(not served)


def _compare(arguments: argparse.Namespace, flags: tuple[str, ...]) -> int:
    try:
        return compare_arguments.run(arguments, flags)
    except (RecipeError, MeasureError) as error:
        print(f"atom-plugin compare: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(
            f"atom-plugin compare: interrupted; no server is left, finished parts are in {arguments.out}, "
            f"and the same command goes on from there",
            file=sys.stderr,
        )
    return 2


if __name__ == "__main__":
    sys.exit(main())
