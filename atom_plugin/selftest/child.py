"""The process of one cell: reads the cell from a file, runs it, and writes what came out to another."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from atom_plugin.selftest.cells import Cell


def main(cell_file: str, result_file: str) -> None:
    """Run the cell of ``cell_file`` (Cell.to_json) and write its differences to ``result_file``, as JSON.

    What the row raises ends the process with a traceback: the parent says so.
    """
    cell = Cell.from_json(Path(cell_file).read_text())
    reasons = cell.kernel().why_not(cell.problem)
    if reasons:
        raise ValueError(f"{cell.row} does not run here: {'; '.join(reasons)}")
    from atom_plugin.selftest.runs import differences

    found = [asdict(difference) for difference in differences(cell)]
    Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
