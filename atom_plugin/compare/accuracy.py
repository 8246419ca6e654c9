"""The accuracy part: GSM8K by lm-eval's own task, and by the few-shot benchmark of SGLang's developers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from urllib.parse import urlsplit

from atom_plugin.compare import few_shot, lm_eval_gsm8k
from atom_plugin.compare.dataset import ASKED, SHOWN
from atom_plugin.compare.failure import MeasureError
from atom_plugin.compare.processes import Command, run_watched
from atom_plugin.compare.progress import Show
from atom_plugin.compare.servers import Server
from atom_plugin.recipe import Accuracy

PARTS = {"lm-eval": "accuracy-lm-eval", "sglang": "accuracy-sglang"}


def spec_path(folder: Path, harness: str) -> Path:
    """Return where the spec of a harness is kept, in the folder of a variant."""
    return folder / f"{PARTS[harness]}.spec.json"


def lm_eval_spec(settings: Accuracy, *, url: str, model: str, task: Path | None, folder: Path) -> lm_eval_gsm8k.Spec:
    """Return what lm-eval is to do with the server at ``url``; ``task`` None for the harness's gsm8k of the hub."""
    return lm_eval_gsm8k.Spec(
        url=url,
        model=model,
        task=str(task or ""),
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        concurrency=settings.concurrency,
        retries=settings.retries,
        max_tokens=settings.max_tokens,
        result=str(folder / f"{PARTS['lm-eval']}.json"),
        samples=str(folder / f"{PARTS['lm-eval']}.samples.jsonl"),
    )


def run_lm_eval(server: Server, spec: lm_eval_gsm8k.Spec, folder: Path, show: Show) -> None:
    """Run lm-eval beside ``server``; its result is then in ``spec.result``."""
    path = spec_path(folder, "lm-eval")
    lm_eval_gsm8k.write_spec(path, spec)
    words = (sys.executable, "-m", "atom_plugin.compare.lm_eval_gsm8k", str(path))
    log = folder / f"{PARTS['lm-eval']}.log"
    run_watched(Command(words, {}), log, folder=folder, watched=server, show=show)


def lm_eval_command(spec: lm_eval_gsm8k.Spec) -> str:
    """Return lm-eval's own command line for the same run."""
    arguments = ",".join(f"{name}={value}" for name, value in spec.model_args().items())
    words = ["lm_eval", "--model", "local-completions", "--model_args", arguments]
    words += ["--tasks", spec.task or lm_eval_gsm8k.TASK, "--num_fewshot", str(spec.num_fewshot)]
    return shlex.join([*words, *(["--limit", str(spec.limit)] if spec.limit else [])])


def few_shot_spec(settings: Accuracy, *, url: str, problems: Path, folder: Path) -> few_shot.Spec:
    """Return what SGLang's benchmark is to do with the server at ``url``."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise MeasureError(f"SGLang's few-shot benchmark takes http://HOST:PORT, not {url}; use --harness lm-eval")
    lines = len(problems.read_text().splitlines())
    return few_shot.Spec(
        host=parts.hostname,
        port=parts.port,
        data=str(problems),
        num_fewshot=settings.num_fewshot,
        limit=min(settings.limit or lines, lines),
        concurrency=settings.concurrency,
        max_tokens=settings.max_tokens,
        result=str(folder / f"{PARTS['sglang']}.json"),
    )


def run_few_shot(server: Server, spec: few_shot.Spec, folder: Path, show: Show) -> None:
    """Run SGLang's benchmark beside ``server``; its result is then in ``spec.result``."""
    path = spec_path(folder, "sglang")
    few_shot.write_spec(path, spec)
    words = (sys.executable, "-m", "atom_plugin.compare.few_shot", str(path))
    log = folder / f"{PARTS['sglang']}.log"
    run_watched(Command(words, {}), log, folder=folder, watched=server, show=show)


def few_shot_command(spec: few_shot.Spec) -> str:
    """Return the benchmark's own command line for the same run."""
    words = ["python", "-m", "sglang.test.few_shot_gsm8k", "--num-shots", str(spec.num_fewshot)]
    words += ["--data-path", spec.data, "--num-questions", str(spec.limit), "--max-new-tokens", str(spec.max_tokens)]
    words += ["--parallel", str(spec.concurrency), "--host", spec.host, "--port", str(spec.port)]
    return shlex.join(words)


def write_dataset_task(folder: Path) -> Path:
    """Write lm-eval's task on the problems that ``folder`` holds."""
    return lm_eval_gsm8k.write_task(folder, folder / ASKED, folder / SHOWN)
