"""atom-plugin: the command line beside the server."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from atom_plugin import doctor
from atom_plugin.compare import arguments as compare_arguments
from atom_plugin.compare.failure import MeasureError
from atom_plugin.recipe import AITERS, ARCHS, DTYPES, RecipeError

#: What ``explain`` plans for where it is not told.
PLAN_DEFAULTS: dict[str, object] = {
    "tp": 1, "ep": 1, "dp": 1, "dtype": "bfloat16", "kv_cache_dtype": "auto", "page_size": 1, "aiter": "main",
    "mem_fraction_static": 0.85, "arch": None, "query_len": None, "memory": None, "json": False,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run ``atom-plugin`` with ``argv`` (default: the process's) and return its exit status."""
    parser = argparse.ArgumentParser(prog="atom-plugin", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_doctor(commands.add_parser("doctor", help="check what a launch needs; exit 1 on what would break it"))
    _add_explain(commands.add_parser("explain", help="print what a model gets and holds; exit 1 where it is refused"))
    comparison = commands.add_parser("compare", help="accuracy, agreement and speed of two variants; exit 1 if worse")
    compare_arguments.add_arguments(comparison)
    ours, flags = compare_arguments.split_flags(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(ours)
    if arguments.command == "compare":
        return _compare(arguments, flags)
    run: Callable[[argparse.Namespace], int] = {"doctor": _doctor, "explain": _explain}[arguments.command]
    return run(arguments)


def _add_doctor(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--selftest",
        nargs="?",
        const="",
        metavar="RECIPE",
        help="also run kernels against their reference: those that RECIPE gets, or all that can run here",
    )
    command.add_argument("--config", help="a config.json to read in place of that of RECIPE's model")
    command.add_argument("--time-limit", type=float, default=600.0, help="seconds for each kernel of --selftest")
    command.add_argument("--json", action="store_true", help="machine-readable")


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.config is not None and not arguments.selftest:
        return _misused("doctor", "--config goes with --selftest RECIPE")
    findings = doctor.examine()
    failed = doctor.has_failed(findings)
    if not arguments.json:
        print(doctor.report(findings), flush=True)
    outcomes: list[dict[str, object]] = []
    if arguments.selftest is not None:
        if doctor.lacks_torch(findings):
            print(
                "atom-plugin doctor --selftest: there is no torch here, and no kernel runs without it", file=sys.stderr
            )
            return 1
        from atom_plugin.selftest.command import SelfTestError, run

        try:
            outcomes, went_well = run(
                arguments.selftest or None, arguments.config, arguments.time_limit, quiet=arguments.json
            )
        except SelfTestError as error:
            print(f"atom-plugin doctor --selftest: {error}", file=sys.stderr)
            return 2
        failed = failed or not went_well
    if arguments.json:
        print(doctor.as_json(findings, outcomes))
    return int(failed)


def _add_explain(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="folder of a checkpoint, its config.json, or a repo; with --check a recipe")
    command.add_argument("--check", action="store_true", help="check a recipe (TOML), which holds what follows")
    command.add_argument("--config", help="with --check: a config.json to read in place of that of the recipe's model")
    command.add_argument("--arch", choices=ARCHS, help="of the machine; required, except with --check")
    command.add_argument("--tp", type=int, help="ranks: SGLang's --tp-size")
    command.add_argument("--ep", type=int, help="of these, over how many experts are split: --ep-size")
    command.add_argument("--dp", type=int, help="of these, over how many attention is data parallel")
    command.add_argument("--dtype", choices=DTYPES)
    command.add_argument("--kv-cache-dtype", help="as the server's flag")
    command.add_argument("--page-size", type=int, help="tokens")
    command.add_argument("--query-len", type=int, help="new tokens a request: 1 for decode; default: every mode")
    command.add_argument("--aiter", choices=AITERS, help="version on the machine")
    command.add_argument("--memory", type=float, help="GiB of one device: how many tokens fit beside the weights")
    command.add_argument("--mem-fraction-static", type=float, help="as the server's flag")
    command.add_argument("--why", action="store_true", help="every refused row with its reasons")
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.set_defaults(**PLAN_DEFAULTS)


def _explain(arguments: argparse.Namespace) -> int:
    if not arguments.check and arguments.config is not None:
        return _misused("explain", "--config goes with --check")
    if not arguments.check and arguments.arch is None:
        return _misused("explain", f"--arch is required: {', '.join(ARCHS)}")
    if importlib.util.find_spec("torch") is None:  # as doctor says, which does without
        return _misused("explain", "there is no torch here, and its dtypes are what kernels are chosen by: install it")
    from atom_plugin import explain
    from atom_plugin.configs import ConfigError

    if arguments.check:
        return _check(arguments)
    plan = explain.Plan(
        arch=arguments.arch,
        tp=arguments.tp,
        ep=arguments.ep,
        dp=arguments.dp,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        page_size=arguments.page_size,
        query_len=arguments.query_len,
        aiter=arguments.aiter,
        memory_gib=arguments.memory,
        mem_fraction=arguments.mem_fraction_static,
    )
    try:
        text, served = explain.report(arguments.model, plan, why=arguments.why, as_json=arguments.json)
    except (ConfigError, ValueError) as error:
        print(f"atom-plugin explain: {error}", file=sys.stderr)
        return 2
    print(text)
    return int(not served)


def _check(arguments: argparse.Namespace) -> int:
    from atom_plugin.explain.check import check

    ours = ("command", "model", "check", "config", "why")
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(arguments).items()
        if name not in ours and value != PLAN_DEFAULTS.get(name)
    ]
    if given:
        return _misused("explain", f"with --check the recipe says how it is served: drop {', '.join(given)}")
    text, problems = check(arguments.model, config=arguments.config, why=arguments.why)
    if text:
        print(text)
    for problem in problems:
        print(f"atom-plugin explain --check: {problem}", file=sys.stderr)
    if not problems:
        print(f"{arguments.model}: nothing is wrong with it")
    return int(bool(problems))


def _misused(command: str, problem: str) -> int:
    print(f"atom-plugin {command}: {problem}", file=sys.stderr)
    return 2


def _compare(arguments: argparse.Namespace, flags: tuple[str, ...]) -> int:
    sys.excepthook = _end_unjudged
    try:
        return compare_arguments.run(arguments, flags)
    except (RecipeError, MeasureError, OSError) as error:  # a disk that is full: 1 would say "worse"
        print(f"atom-plugin compare: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(
            f"atom-plugin compare: interrupted; no server is left, finished parts are in {arguments.out}, "
            f"and the same command goes on from there",
            file=sys.stderr,
        )
    return 2


def _end_unjudged(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End as what could not be measured: after a traceback Python's own exit status is 1, which says "worse"."""
    traceback.print_exception(kind, error, trace)
    print(
        "atom-plugin compare: the above is a fault of compare itself; nothing was judged", file=sys.stderr, flush=True
    )
    os._exit(2)


if __name__ == "__main__":
    sys.exit(main())
