"""The report of a comparison: verdicts, tables as engineers paste them into pull requests, and how it was run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atom_plugin.compare import accuracy, few_shot, lm_eval_gsm8k, plots, speed, verdict
from atom_plugin.compare.findings import Findings, find
from atom_plugin.compare.measuring import COMMAND, SHOWN_OF_SERVER, Run
from atom_plugin.compare.state import write_whole
from atom_plugin.recipe import Accuracy, Agreement, Speed

REPORT, FIGURES = "report.md", "report.json"


def write(run: Run) -> list[verdict.Verdict]:
    """Write report.md, report.json and the pictures of a finished run, and return the verdicts."""
    findings, folder = find(run), run.store.folder
    margin = (run.recipe.accuracy or Accuracy()).margin
    pictures = plots.draw(findings, folder, margin=margin)
    write_whole(folder / FIGURES, json.dumps(figures(run, findings), indent=1))
    write_whole(folder / REPORT, text(run, findings, pictures))
    return findings.verdicts


def figures(run: Run, findings: Findings) -> dict[str, Any]:
    """Return report.json: ``rows`` are the cells of the speed grid, with ``ratio``; the rest is as in the tables."""
    baseline, candidate = findings.names
    return {
        "title": _title(run),
        "exit_status": verdict.exit_status(findings.verdicts),
        "verdicts": [asdict(one) for one in findings.verdicts],
        "settings": findings.settings,
        "servers": {name: _of_server(findings, name) for name in findings.names},
        "rows": [
            {**_cell_columns(one), baseline: one.baseline, candidate: one.candidate, "ratio": one.ratio,
             "ratio_low": one.low, "ratio_high": one.high}
            for one in findings.speed
        ],
        "accuracy": [{"of": one.of, "name": one.name, **asdict(one.found)} for one in findings.scores],
        "lm_eval": {name: _without_outcomes(one) for name, one in findings.lm_eval.items()},
        "few_shot": {name: _without_outcomes(one) for name, one in findings.few_shot.items()},
        "agreement": None if findings.agreement is None else asdict(findings.agreement),
    }  # fmt: skip


def text(run: Run, findings: Findings, pictures: Sequence[str]) -> str:
    """Return report.md."""
    baseline, candidate = findings.names
    device = findings.settings["launch"]["device"] or "not known, the servers were running already"
    sections = [
        f"# {_title(run)}",
        table(("", "Verdict", "Figures"), [(one.subject, f"**{one.word}**", one.reason) for one in findings.verdicts]),
        f"{candidate} is judged, {baseline} is the baseline; device: {device}; "
        + "model {model_path}; SGLang {version}.".format_map(findings.servers[baseline]),
        *(_accuracy(findings) if findings.scores else ()),
        *(f"![{name}]({name})" for name in pictures if name == plots.ACCURACY),
        *(_agreement(findings) if findings.agreement is not None else ()),
        *(_speed(findings, run.recipe.speed) if run.recipe.speed is not None else ()),
        *(f"![{name}]({name})" for name in pictures if name == plots.SPEED),
        *_what_ran(run, findings),
        "## How a verdict is made",
        verdict.RULES.format(
            margin=(run.recipe.accuracy or Accuracy()).margin,
            bound=(run.recipe.agreement or Agreement()).bound,
            speed_margin=(run.recipe.speed or Speed()).margin,
        ),
    ]
    return "\n\n".join(sections) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers as they are given."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def _title(run: Run) -> str:
    baseline, candidate = run.names
    return run.recipe.title or f"{Path(run.recipe.model).name or 'running servers'}: {candidate} against {baseline}"


def _without_outcomes(result: Any) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "outcomes"}


def _accuracy(findings: Findings) -> list[str]:
    baseline, candidate = findings.names
    rows = [
        (
            one.name,
            one.found.problems,
            one.found.only_baseline,
            one.found.only_candidate,
            f"{100 * one.found.difference:+.2f}",
            f"{100 * one.found.low:+.2f} to {100 * one.found.high:+.2f}",
            f"{one.found.p:.3g}",
        )
        for one in findings.scores
    ]
    header = ("Paired", "N", f"right only with {baseline}", f"right only with {candidate}", "Difference (points)")
    paired = table((*header, "95% interval", "McNemar p"), rows)
    return ["## Accuracy", *_lm_eval(findings), *_few_shot(findings), "Problem by problem:", paired]


def _lm_eval(findings: Findings) -> list[str]:
    """Return lm-eval's figures in the columns that it prints."""
    if not findings.lm_eval:
        return []
    rows = []
    results = list(findings.lm_eval.values())
    for filter_name in sorted(results[0]["metrics"]):
        for name, one in findings.lm_eval.items():
            score = one["metrics"][filter_name]
            # lm-eval says N/A of one problem's
            value, stderr = (of if isinstance(of, str) else f"{of:.4f}" for of in (score["value"], score["stderr"]))
            task = ("gsm8k", f"{one['task_version']:g}", filter_name, one["num_fewshot"], "exact_match", "↑")
            rows.append((name, *task, value, "±", stderr))
    header = ("Variant", "Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
    title = "lm-eval {version}, its own gsm8k through local-completions:".format_map(results[0])
    return [title, table(header, rows), _cut(findings)]


def _few_shot(findings: Findings) -> list[str]:
    """Return the four figures of SGLang's benchmark as it prints them."""
    if not findings.few_shot:
        return []
    figures = {"accuracy": "", "invalid": "", "latency": " s", "output_throughput": " token/s"}
    rows = [
        (name, *(f"{one[figure]:.3f}{unit}" for figure, unit in figures.items()))
        for name, one in findings.few_shot.items()
    ]
    header = ("Variant", "Accuracy", "Invalid", "Latency", "Output throughput")
    title = "SGLang's few-shot benchmark (it asks the problems that it shows as well, and counts no answers cut off):"
    return [title, table(header, rows)]


def _cut(findings: Findings) -> str:
    """Return which share of the answers the token limit cut off."""
    shares = [
        f"{name} {one['cut']} of {one['answers']} ({100 * one['cut'] / one['answers']:.1f}%)"
        for name, one in findings.lm_eval.items()
    ]
    return f"Answers cut off at {findings.settings['accuracy']['max_tokens']} tokens: {', '.join(shares)}."


def _agreement(findings: Findings) -> list[str]:
    found = findings.agreement
    assert found is not None
    baseline, candidate = findings.names
    spreads = {
        "prompts, teacher-forced": found.prompts,
        f"greedy answers of {baseline}, teacher-forced": found.answers,
        "greedy decoding, to the first token that differs": found.decoded,
        f"for scale: {baseline} against itself, decoding against prefill": found.noise,
    }
    rows = [
        (name, one.tokens, f"{one.mean:.2e}", f"{one.p99:.2e}", f"{one.largest:.2e}") for name, one in spreads.items()
    ]
    prompts, differing = len(found.first_differs), [first for first in found.first_differs if first is not None]
    where = f", at token {min(differing)} at the earliest" if differing else ""
    return [
        "## Agreement",
        "Absolute differences of logprobs, in nats:",
        table(("", "Tokens", "Mean", "p99", "Largest"), rows),
        f"Greedy answers that part: {len(differing)} of {prompts}{where}. "
        f"KL({baseline} || {candidate}) a token, over the "
        + "{top_k} likeliest tokens ".format_map(findings.settings["agreement"])
        + f"and the rest as one: mean {found.kl_mean:.2e}, largest {found.kl_largest:.2e}.",
    ]


def _cell_columns(one: speed.CellSpeed) -> dict[str, int]:
    return {
        "Input_Tokens": one.cell.input_len,
        "Output_Tokens": one.cell.output_len,
        "Max_Concurrency": one.cell.concurrency,
        "Num_Prompts": one.prompts,
    }


def _speed(findings: Findings, settings: Speed) -> list[str]:
    output, total = speed.THROUGHPUTS
    shown = [output, *speed.LATENCIES, total]
    columns = [f"{column} {name}" for column in shown for name in findings.names]
    rows = []
    for one in findings.speed:
        values = [f"{side[column]:.2f}" for column in shown for side in (one.baseline, one.candidate)]
        rows.append((*_cell_columns(one).values(), f"{one.ratio:.2f}", f"{one.low:.2f} to {one.high:.2f}", *values))
    header = ("Input_Tokens", "Output_Tokens", "Max_Concurrency", "Num_Prompts", "Ratio", "Range", *columns)
    return [
        "## Speed",
        f"Medians of {settings.repeats} runs; throughputs in tokens/s; ratio: output throughput of "
        f"{findings.names[1]} / {findings.names[0]}; range: between any two runs. The servers ran one after the other.",
        table(header, rows),
    ]


def _of_server(findings: Findings, name: str) -> dict[str, Any]:
    info = findings.servers[name]
    return {key: info[key] for key in SHOWN_OF_SERVER}


def _what_ran(run: Run, findings: Findings) -> list[str]:
    launch = findings.settings["launch"]
    rows = [(key, *(_of_server(findings, name)[key] for name in findings.names)) for key in SHOWN_OF_SERVER]
    versions = ", ".join(f"{name} {version}" for name, version in launch["versions"].items())
    return [
        "## What ran",
        table(("", *findings.names), rows),
        f"Here: {versions}.",
        "```\n" + "\n\n".join(_commands(run, findings)) + "\n```",
    ]


def _commands(run: Run, findings: Findings) -> list[str]:
    """Return the command lines, as a person would type them to get the same again."""
    commands = []
    for name in findings.names:
        path = run.store.folder_of(name) / COMMAND
        commands.append(f"# server {name}\n{run.urls[name] if name in run.urls else path.read_text().strip()}")
    folder = run.store.folder_of(findings.names[0])
    if findings.lm_eval:
        spec = lm_eval_gsm8k.Spec(**json.loads(accuracy.spec_path(folder, "lm-eval").read_text()))
        commands.append(f"# accuracy\n{accuracy.lm_eval_command(spec)}")
    if findings.few_shot:
        sgl = few_shot.Spec(**json.loads(accuracy.spec_path(folder, "sglang").read_text()))
        commands.append(f"# accuracy, as SGLang's developers measure it\n{accuracy.few_shot_command(sgl)}")
    if findings.speed:
        commands.append(f"# speed, the first cell\n{findings.speed_command}")
    return commands
