"""What ends a comparison without a verdict."""

from __future__ import annotations

import re
from pathlib import Path

#: How Python and our refusals begin the line that says what was wrong; server logs may put a time in front.
_ERROR = re.compile(
    r"^(\[[^\]]*\] )?([A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b|error:|.*: error:|atom-plugin cannot )"
)
#: What SGLang logs once it serves; errors before it are of attempts that it got over.
_IS_UP = "The server is fired up"
_SHOWN_LINES, _SHOWN_CHARACTERS = 6, 1200


class MeasureError(RuntimeError):
    """Something could not be measured; the text says what was asked, what is there and what to do."""


def last_error(log: Path) -> str:
    """Return the last error of a log with the lines after it, or its last lines where no error stands out."""
    lines = [line for line in re.split(r"[\r\n]+", log.read_text(errors="replace")) if line.strip()]
    lines = lines[max((index + 1 for index, line in enumerate(lines) if _IS_UP in line), default=0) :]
    errors = [index for index, line in enumerate(lines) if _ERROR.match(line)]
    shown = lines[errors[-1] :][:_SHOWN_LINES] if errors else lines[-_SHOWN_LINES:]
    return "\n".join(shown)[:_SHOWN_CHARACTERS] if shown else "(the log is empty)"
