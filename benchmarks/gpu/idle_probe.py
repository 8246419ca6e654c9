"""An SGLang plugin for the soak: notes in $ATOM_IDLE_REPORT that a scheduler, idle, has looked for leaked slots.

SGLang looks at both pools whenever it has nothing to do, and raises what it finds (SGLANG_ENABLE_STRICT_MEM_CHECK_
DURING_IDLE is on by default), which ends the server. Here it is noted, at most ten times a second, how often it looked,
when, and what it counted.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

_CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"
_state: dict[str, Any] = {"checks": 0, "time": 0.0, "leak": False, "slots": [], "free_requests": 0}


def register() -> None:
    """Hook both checks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_CHECKER}._check_all_pools", check_slots, HookType.AROUND)
    HookRegistry.register(f"{_CHECKER}._check_req_pool", check_requests, HookType.AROUND)


def check_slots(original: Any, checker: Any, *args: Any, **kwargs: Any) -> Any:
    """Check token slots, and keep what the check says."""
    found = original(checker, *args, **kwargs)
    _state["leak"], _state["slots"] = bool(found[0]), list(found[1])
    return found


def check_requests(original: Any, checker: Any, *args: Any, **kwargs: Any) -> Any:
    """Check request rows, which comes after the slots, and note that both were checked."""
    original(checker, *args, **kwargs)
    _state["checks"] += 1
    _state["free_requests"] = len(checker.req_to_token_pool.free_slots)
    if time.time() > _state["time"] + 0.1:
        _state["time"] = time.time()
        report = Path(os.environ["ATOM_IDLE_REPORT"])
        partial = report.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(_state))
        partial.replace(report)
