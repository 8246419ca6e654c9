"""What a comparison measures, in order: the parts of one variant on its server, then those of the other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom_plugin.compare import accuracy, agreement, dataset, servers, speed
from atom_plugin.compare.failure import MeasureError
from atom_plugin.compare.processes import Command, run_watched
from atom_plugin.compare.progress import Progress, Show
from atom_plugin.compare.servers import Server
from atom_plugin.compare.state import Store, write_whole
from atom_plugin.recipe import Accuracy, Agreement, Recipe, Speed

#: The part that holds what a server says of itself.
SERVER = "server"
#: Of what a server says of itself: what a reader compares first.
SHOWN_OF_SERVER = (
    "version", "model_impl", "attention_backend", "dtype", "kv_cache_dtype", "quantization", "page_size", "tp_size",
    "ep_size", "dp_size",
)  # fmt: skip
#: The file with a launched server's command line, in the folder of its variant.
COMMAND = "command.txt"
#: What a server logs when our model is in it (``resolve``).
_SERVES_OURS = "--model-impl atom: "


@dataclass(frozen=True)
class Part:
    """One thing to measure of a server: the ``name`` of its result, what to tell a person, and how."""

    name: str
    title: str
    measure: Callable[[Server, Show], None]


@dataclass(frozen=True)
class Run:
    """A comparison: ``recipe`` has two variants; ``urls`` of servers that already run, by variant."""

    recipe: Recipe
    urls: dict[str, str]
    port: int | None
    start_seconds: float
    store: Store
    progress: Progress

    @property
    def names(self) -> tuple[str, str]:
        """The variants, the baseline first."""
        baseline, candidate = self.recipe.variants
        return baseline, candidate

    @property
    def data(self) -> Path:
        """The folder of the problems."""
        return self.store.folder / "dataset"


def prepare_data(run: Run) -> None:
    """Have the problems in ``run.data``, from a file that is checked or from the hub."""
    recipe = run.recipe
    if recipe.accuracy is None and recipe.agreement is None:
        return
    run.data.mkdir(exist_ok=True)
    if recipe.dataset is not None:
        asked, shown = dataset.split(recipe)
        dataset.write_problems(run.data / dataset.ASKED, asked)
        dataset.write_problems(run.data / dataset.SHOWN, shown or asked)
    elif not (run.data / dataset.ASKED).is_file():
        words = (sys.executable, "-m", "atom_plugin.compare.dataset", str(run.data))
        with run.progress.step("GSM8K from the hub") as show:
            try:
                run_watched(Command(words, {}), run.data / "hub.log", folder=run.data, watched=None, show=show)
            except MeasureError as error:
                raise MeasureError(
                    f"GSM8K ({dataset.HUB_NAME}) cannot be had from the hub; --dataset FILE.jsonl (lines of question "
                    f"and answer, as in GSM8K) needs no hub. {error}"
                ) from error


def measure(run: Run, name: str) -> None:
    """Measure the parts of variant ``name`` that are not finished, on a server that lives for them."""
    todo = []
    for part in parts(run, name):
        if run.store.has(name, part.name):
            run.progress.say(f"ok  {name}: {part.title}: finished before")
        else:
            todo.append(part)
    if not todo:
        return
    with contextlib.ExitStack() as stack:
        with run.progress.step(f"{name}: server") as show:
            server = stack.enter_context(_server(run, name, show))
            info = server.ask("/server_info")
            if run.store.has(name, SERVER):
                _check_same_server(server, run.store.load(name, SERVER), info)
            run.store.save(name, SERVER, info)
        for part in todo:
            with run.progress.step(f"{name}: {part.title}") as show:
                try:
                    part.measure(server, show)
                except MeasureError as error:
                    raise MeasureError(f"{name}: {part.title}: {error}") from error


@contextlib.contextmanager
def _server(run: Run, name: str, show: Show) -> Iterator[Server]:
    """Yield a server of variant ``name``, launched where it does not run already; MeasureError where there is none."""
    if name in run.urls:
        yield servers.running(name, run.urls[name])
        return
    port = servers.choose_port(run.port)
    command = servers.launch_command(run.recipe, name, port)
    folder = run.store.folder_of(name)
    write_whole(folder / COMMAND, f"{command}\n")
    with servers.serve(
        command, name=name, port=port, folder=folder, start_seconds=run.start_seconds, show=show
    ) as server:
        _check_model_impl(server, command)
        yield server


def _check_model_impl(server: Server, command: Command) -> None:
    """Raise MeasureError where ``--model-impl atom`` was asked and SGLang serves its own model all the same."""
    if server.log is None or server.ask("/server_info")["model_impl"] != "atom":
        return
    if _SERVES_OURS not in server.log.read_text(errors="replace"):
        raise MeasureError(
            f"{command} serves SGLang's own model: SGLang has not loaded atom-plugin, and would be compared with "
            f"itself. `atom-plugin doctor` says why."
        )


def _check_same_server(server: Server, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise MeasureError where the finished parts are of a server with other flags or another model."""
    changed = [
        f"{key} was {before.get(key)}, and is {now.get(key)}"
        for key in ("model_path", *SHOWN_OF_SERVER)
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise MeasureError(
            f"the server {server.name} at {server.url} is not the one that the finished parts were measured on: "
            f"{'; '.join(changed)}. Give another --out"
        )


def parts(run: Run, name: str) -> list[Part]:
    """Return what is measured of variant ``name``."""
    recipe, found = run.recipe, []
    if recipe.accuracy is not None:
        found += _accuracy_parts(run, name, recipe.accuracy)
    if recipe.agreement is not None:
        found.append(_agreement_part(run, name, recipe.agreement))
    if recipe.speed is not None:
        found += _speed_parts(run, name, recipe.speed)
    return found


def _accuracy_parts(run: Run, name: str, settings: Accuracy) -> list[Part]:
    folder = run.store.folder_of(name)

    def lm_eval(server: Server, show: Show) -> None:
        task = accuracy.write_dataset_task(run.data) if run.recipe.dataset is not None else None
        spec = accuracy.lm_eval_spec(settings, url=server.url, model=server.model(), task=task, folder=folder)
        accuracy.run_lm_eval(server, spec, folder, show)

    def few_shot(server: Server, show: Show) -> None:
        problems = Path(run.recipe.dataset) if run.recipe.dataset is not None else run.data / dataset.ASKED
        spec = accuracy.few_shot_spec(settings, url=server.url, problems=problems, folder=folder)
        accuracy.run_few_shot(server, spec, folder, show)

    how = {
        "lm-eval": Part(accuracy.PARTS["lm-eval"], "accuracy, lm-eval gsm8k", lm_eval),
        "sglang": Part(accuracy.PARTS["sglang"], "accuracy, SGLang's few-shot benchmark", few_shot),
    }
    return [how[harness] for harness in settings.harness]


def _agreement_part(run: Run, name: str, settings: Agreement) -> Part:
    def agree(server: Server, show: Show) -> None:
        if name == run.names[0]:
            problems = dataset.read_problems(run.data / dataset.ASKED)[: settings.prompts]
            records = agreement.measure_baseline(server, problems, settings, show)
        else:
            baseline = run.store.load(run.names[0], agreement.PART)
            records = agreement.measure_candidate(server, baseline, settings, show)
        run.store.save(name, agreement.PART, records)

    return Part(agreement.PART, f"agreement, {settings.prompts} prompts", agree)


def _speed_parts(run: Run, name: str, settings: Speed) -> list[Part]:
    folder = run.store.folder_of(name)

    def part(cell: speed.Cell, repeat: int) -> Part:
        def bench(server: Server, show: Show) -> None:
            output = folder / f"{cell.part(repeat)}.jsonl"
            command = speed.command(settings, cell, repeat, server=server, output=output)
            prompts = speed.num_prompts(settings, cell)
            run.store.save(name, cell.part(repeat), speed.measure(server, command, output, prompts=prompts, show=show))

        return Part(cell.part(repeat), f"speed, {cell}, run {repeat + 1} of {settings.repeats}", bench)

    return [part(cell, repeat) for cell, repeat in speed.runs(settings)]
