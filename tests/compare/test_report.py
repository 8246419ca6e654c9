"""Speed cells, tables, pictures and JSON of a finished comparison, from parts written by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from atom_plugin.compare import accuracy, agreement, measuring, report, speed, state
from atom_plugin.compare.progress import Progress
from atom_plugin.recipe import Accuracy, Agreement, Recipe, Speed, Variant

SPEED = Speed(lengths=((64, 16), (256, 16)), concurrency=(1, 8), repeats=2, prompts_per_slot=4)
RECIPE = Recipe(
    title="The tiny MoE",
    model="tiny",
    variants={"sglang": Variant(flags=()), "atom": Variant(flags=())},
    accuracy=Accuracy(harness=("lm-eval", "sglang"), num_fewshot=0),
    agreement=Agreement(prompts=1),
    speed=SPEED,
)
INFO = dict.fromkeys(measuring.SHOWN_OF_SERVER, "x") | {"version": "0.5.23", "model_path": "tiny", "model_impl": "atom"}


def lm_eval_result(wrong: int) -> dict[str, Any]:
    right = [0] * wrong + [1] * (200 - wrong)
    score = {"value": 1 - wrong / 200, "stderr": 0.0123}
    return {
        "harness": "lm-eval", "version": "0.4.13", "task_version": 3.0, "num_fewshot": 0,
        "metrics": {"flexible-extract": score, "strict-match": score},
        "outcomes": {"flexible-extract": right, "strict-match": right},
        "cut": 2, "answers": 200, "output_tokens": 9000, "seconds": 10.0,
    }  # fmt: skip


def bench_result(rate: float) -> dict[str, Any]:
    return {
        "command": "python -m sglang.benchmark.serving", "mean_ttft_ms": 12.345, "mean_tpot_ms": 1000 / rate,
        "output_throughput": rate, "total_throughput": 5 * rate,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> measuring.Run:
    """A run of which every part is finished: atom has 2 of 200 problems wrong and twice the throughput."""
    folder = tmp_path / "out"
    settings = {
        "launch": {"device": "CPU, 2 cores", "versions": {"sglang": "0.5.23"}},
        "accuracy": {"max_tokens": 128},
        "agreement": {"top_k": 2},
    }
    with state.opened(folder, settings) as store:
        for name, factor, wrong in (("sglang", 1, 0), ("atom", 2, 2)):
            spec = accuracy.lm_eval_spec(
                Accuracy(limit=7), url="http://h:1", model="tiny", task=None, folder=store.folder_of(name)
            )
            accuracy.lm_eval_gsm8k.write_spec(accuracy.spec_path(store.folder_of(name), "lm-eval"), spec)
            (folder / "problems.jsonl").write_text("{}\n" * 200)
            few = accuracy.few_shot_spec(
                Accuracy(), url="http://h:1", problems=folder / "problems.jsonl", folder=store.folder_of(name)
            )
            accuracy.few_shot.write_spec(accuracy.spec_path(store.folder_of(name), "sglang"), few)
            (store.folder_of(name) / measuring.COMMAND).write_text(f"serve {name}\n")
            store.save(name, measuring.SERVER, INFO)
            store.save(name, accuracy.PARTS["lm-eval"], lm_eval_result(wrong))
            few_shot = {"num_fewshot": 0, "accuracy": 1.0, "invalid": 0.005, "latency": 3.5, "output_throughput": 99.5}
            store.save(name, accuracy.PARTS["sglang"], {**few_shot, "outcomes": [1] * 200})
            record = {"prompt": [1, 2], "answer": [3], "decoded": [-0.5], "forced": [-1.0, -0.5]}
            store.save(name, agreement.PART, [{**record, "top": [[[-0.5, 3], [-1.0, 4]]] * 2}])
            for cell, repeat in speed.runs(SPEED):
                store.save(name, cell.part(repeat), bench_result(100 * factor * (cell.concurrency + 0.1 * repeat)))
        return measuring.Run(RECIPE, {}, None, 1.0, store, Progress(Console()))


def test_report_begins_with_the_verdicts(run: measuring.Run) -> None:
    verdicts = report.write(run)
    text = (run.store.folder / report.REPORT).read_text()
    assert [one.word for one in verdicts] == ["cannot tell", "same", "same", "better"]
    assert text.index("**cannot tell**") < text.index("## Accuracy") < text.index("## Agreement") < text.index("## Spe")
    assert "device: CPU, 2 cores" in text and "serve atom" in text and "lm_eval --model local-completions" in text
    assert "--limit 7" in text and "tokenizer_backend=None" in text


def test_tables_have_the_columns_that_engineers_paste(run: measuring.Run) -> None:
    report.write(run)
    text = (run.store.folder / report.REPORT).read_text()
    assert "| Variant | Tasks | Version | Filter | n-shot | Metric |  | Value |  | Stderr |" in text
    assert "| atom | gsm8k | 3 | flexible-extract | 0 | exact_match | ↑ | 0.9900 | ± | 0.0123 |" in text
    assert "| sglang | 1.000 | 0.005 | 3.500 s | 99.500 token/s |" in text
    assert "atom 2 of 200 (1.0%)" in text
    assert "| Input_Tokens | Output_Tokens | Max_Concurrency | Num_Prompts | Ratio | Range | Output_Throu" in text
    assert "| 256 | 16 | 8 | 32 | 2.00 | 1.98 to 2.02 | 805.00 | 1610.00 | 12.35 | 12.35 | 1.24 | 0.62 |" in text


def test_one_problem_has_no_standard_error(run: measuring.Run) -> None:
    result = lm_eval_result(0)
    result["metrics"]["flexible-extract"]["stderr"] = "N/A"
    run.store.save("atom", accuracy.PARTS["lm-eval"], result)
    report.write(run)
    assert "| 1.0000 | ± | N/A |" in (run.store.folder / report.REPORT).read_text()


def test_json_has_a_row_a_cell_with_the_ratio(run: measuring.Run) -> None:
    report.write(run)
    found = json.loads((run.store.folder / report.FIGURES).read_text())
    assert found["exit_status"] == 2 and len(found["rows"]) == 4
    assert [(row["Input_Tokens"], row["Max_Concurrency"]) for row in found["rows"]] == [
        (64, 1), (64, 8), (256, 1), (256, 8),
    ]  # fmt: skip
    assert all(row["ratio"] == pytest.approx(2) for row in found["rows"])
    assert found["accuracy"][0]["only_baseline"] == 2 and "outcomes" not in found["lm_eval"]["atom"]


def test_pictures_are_pictures(run: measuring.Run) -> None:
    report.write(run)
    for name in ("accuracy.png", "throughput_latency.png"):
        head = (run.store.folder / name).read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", head[16:])) > 200


def test_parts_that_were_not_asked_are_not_there(run: measuring.Run) -> None:
    import dataclasses

    only_speed = dataclasses.replace(run, recipe=dataclasses.replace(RECIPE, accuracy=None, agreement=None))
    assert [one.subject for one in report.write(only_speed)] == ["speed"]
    text = (run.store.folder / report.REPORT).read_text()
    assert "## Accuracy" not in text and "## Agreement" not in text and "accuracy.png" not in text


def test_every_cell_runs_once_before_any_runs_again() -> None:
    order = list(speed.runs(SPEED))
    assert [repeat for _, repeat in order] == [0] * 4 + [1] * 4
    assert len({cell.part(repeat) for cell, repeat in order}) == 8
