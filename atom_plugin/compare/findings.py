"""What the finished parts of both variants say together: the figures that report, plots and verdicts share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atom_plugin.compare import accuracy, agreement, paired, speed, verdict
from atom_plugin.compare.measuring import SERVER, Run
from atom_plugin.compare.state import SETTINGS
from atom_plugin.recipe import Accuracy

#: The filter of lm-eval's gsm8k that the verdict is on; strict-match scores the form of an answer as well.
FLEXIBLE = "flexible-extract"


@dataclass(frozen=True, kw_only=True)
class Score:
    """One way of scoring the same answers of both variants, ``of`` lm-eval or SGLang's benchmark."""

    of: str
    name: str
    found: paired.Paired


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All of a comparison; what was not asked is empty or None. ``names``: baseline, candidate."""

    names: tuple[str, str]
    settings: Mapping[str, Any]
    servers: Mapping[str, Mapping[str, Any]]
    lm_eval: Mapping[str, Mapping[str, Any]]
    few_shot: Mapping[str, Mapping[str, Any]]
    scores: list[Score]
    agreement: agreement.Comparison | None
    speed: list[speed.CellSpeed]
    speed_command: str
    verdicts: list[verdict.Verdict]


def find(run: Run) -> Findings:
    """Return the findings of a run whose parts are all finished."""
    recipe, store, names = run.recipe, run.store, run.names
    of_accuracy = recipe.accuracy.harness if recipe.accuracy is not None else ()
    results = {harness: {name: store.load(name, accuracy.PARTS[harness]) for name in names} for harness in of_accuracy}
    lm_eval, few_shot = results.get("lm-eval", {}), results.get("sglang", {})
    scores = [*_lm_eval_scores(names, lm_eval), *_few_shot_scores(names, few_shot)]
    agreed = (
        agreement.compare(*(store.load(name, agreement.PART) for name in names))
        if recipe.agreement is not None
        else None
    )
    cells, command = _speed(run)
    verdicts = _accuracy_verdicts(names, recipe.accuracy, scores, lm_eval.get(names[0]))
    if agreed is not None and recipe.agreement is not None:
        verdicts.append(verdict.of_agreement(agreed, bound=recipe.agreement.bound))
    if recipe.speed is not None:
        verdicts.append(verdict.of_speed(cells, margin=recipe.speed.margin))
    return Findings(
        names=names,
        settings=json.loads((store.folder / SETTINGS).read_text()),
        servers={name: store.load(name, SERVER) for name in names},
        lm_eval=lm_eval,
        few_shot=few_shot,
        scores=scores,
        agreement=agreed,
        speed=cells,
        speed_command=command,
        verdicts=verdicts,
    )


def _lm_eval_scores(names: tuple[str, str], results: Mapping[str, Any]) -> list[Score]:
    if not results:
        return []
    baseline, candidate = (results[name]["outcomes"] for name in names)
    filters = sorted(baseline)  # flexible-extract first, as lm-eval prints them
    return [Score(of="lm-eval", name=one, found=paired.compare(baseline[one], candidate[one])) for one in filters]


def _few_shot_scores(names: tuple[str, str], results: Mapping[str, Any]) -> list[Score]:
    if not results:
        return []
    found = paired.compare(*(results[name]["outcomes"] for name in names))
    return [Score(of="sglang", name="few-shot", found=found)]


def _accuracy_verdicts(
    names: tuple[str, str],
    settings: Accuracy | None,
    scores: list[Score],
    lm_eval_baseline: Mapping[str, Any] | None,
) -> list[verdict.Verdict]:
    verdicts = []
    for score in scores:
        if settings is None or score.name not in (FLEXIBLE, "few-shot"):
            continue
        if score.of == "lm-eval" and lm_eval_baseline is not None:
            subject, cut = (
                f"accuracy (lm-eval gsm8k, {score.name})",
                lm_eval_baseline["cut"] / lm_eval_baseline["answers"],
            )
        else:
            subject, cut = "accuracy (SGLang's few-shot gsm8k)", 0.0
        verdicts.append(verdict.of_accuracy(subject, score.found, names=names, margin=settings.margin, cut=cut))
    return verdicts


def _speed(run: Run) -> tuple[list[speed.CellSpeed], str]:
    settings = run.recipe.speed
    if settings is None:
        return [], ""
    parts = [cell.part(repeat) for cell, repeat in speed.runs(settings)]
    baseline, candidate = ({part: run.store.load(name, part) for part in parts} for name in run.names)
    return speed.compare(settings, baseline, candidate), str(baseline[parts[0]]["command"])
