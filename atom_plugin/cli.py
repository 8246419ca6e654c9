"""atom-plugin: the command line beside the server."""

from __future__ import annotations

import argparse
import sys

from atom_plugin import doctor


def main(argv: list[str] | None = None) -> int:
    """Run ``atom-plugin`` with ``argv`` (default: the process's) and return its exit status."""
    parser = argparse.ArgumentParser(prog="atom-plugin", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("doctor", help="check versions, entry points, machine and hooks; exit 1 on a fault")
    command.add_argument("--json", action="store_true", help="machine-readable findings")
    arguments = parser.parse_args(argv)
    findings = doctor.examine()
    print(doctor.report(findings, as_json=arguments.json))
    return int(any(finding.remedy for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
