"""``atom-plugin compare`` from the checks before any launch to the exit status."""

from __future__ import annotations

import argparse
import signal
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from atom_plugin.compare import dataset, measuring, report, servers, software, state, verdict
from atom_plugin.compare.failure import MeasureError
from atom_plugin.compare.processes import INTERRUPTS
from atom_plugin.compare.progress import Progress
from atom_plugin.recipe import Recipe

#: Of the settings: what a verdict is made with, and no measurement.
_VERDICT_SETTINGS = {"accuracy": "margin", "agreement": "bound", "speed": "margin"}


def compare(arguments: argparse.Namespace, recipe: Recipe, urls: dict[str, str]) -> int:
    """Compare the two variants of ``recipe`` and return the exit status: 0, 1 (worse) or 2 (a verdict cannot be told).

    Raises MeasureError for what could not be measured, KeyboardInterrupt for a signal; no server is left either way.
    """
    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _interrupt)
    servers.reach_loopback_directly()
    _check_before_launching(arguments, recipe, urls)
    progress, out = Progress(Console()), arguments.out.resolve()
    with state.opened(out, settings_of(recipe, urls)) as store:
        run = measuring.Run(recipe, urls, arguments.port, arguments.start_timeout, store, progress)
        measuring.prepare_data(run)
        for name in run.names:
            measuring.measure(run, name)
        with progress.step("report"):
            verdicts = report.write(run)
    for one in verdicts:
        progress.say(f"{one.subject}: {one.word.upper()}: {one.reason}")
    progress.say(f"{out / report.REPORT}")
    return verdict.exit_status(verdicts)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _check_before_launching(arguments: argparse.Namespace, recipe: Recipe, urls: dict[str, str]) -> None:
    """Raise MeasureError for all that can be known to fail before minutes are spent on a launch."""
    problem = servers.why_not_flags(recipe)
    if problem:
        raise MeasureError(problem)
    if recipe.dataset is not None:
        dataset.split(recipe)
    if not urls:
        software.check_model(recipe.model)
        servers.choose_port(arguments.port)


def settings_of(recipe: Recipe, urls: dict[str, str]) -> dict[str, Any]:
    """Return all that the results depend on, in sections."""
    sections: dict[str, Any] = {
        "launch": {
            "model": recipe.model,
            "model_files": None if urls else software.model_files(Path(recipe.model)),
            "shared": recipe.shared,
            "environment": recipe.environment,
            "exported": None if urls else software.exported(),
            "variants": [[name, asdict(variant)] for name, variant in recipe.variants.items()],
            "urls": urls,
            "versions": software.versions(),
            "device": None if urls else software.device(),
        }
    }
    for part, verdict_setting in _VERDICT_SETTINGS.items():
        settings = getattr(recipe, part)
        if settings is not None:
            sections[part] = {name: value for name, value in asdict(settings).items() if name != verdict_setting}
            if part != "speed":
                sections[part]["dataset"] = dataset.fingerprint(recipe.dataset)
                sections[part]["fewshot_dataset"] = dataset.fingerprint(recipe.fewshot_dataset or recipe.dataset)
    return sections
