"""Which of SGLang's MLA backends want rotated columns apart: what we read off their methods is what SGLang lists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import sglang
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from atom_plugin.attention.active import _has_q_rope, takes_rotated_apart
from tests.attention.world import World

SRT = Path(sglang.__file__).parent / "srt"
BACKENDS = {
    "fa3": ("flashattention_backend.py", "FlashAttentionBackend"),
    "flashinfer": ("flashinfer_mla_backend.py", "FlashInferMLAAttnBackend"),
    "triton": ("triton_backend.py", "TritonAttnBackend"),
    "flashmla": ("flashmla_backend.py", "FlashMLABackend"),
    "aiter": ("aiter_backend.py", "AiterAttnBackend"),
}


def parameters_of(file: str, name: str, method: str) -> set[str] | None:
    """Return the parameters of a method, read without importing GPU libraries; None for a method that it inherits."""
    tree = ast.parse((SRT / "layers" / "attention" / file).read_text())
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == method:
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return None


@pytest.mark.parametrize("name", BACKENDS)
def test_the_method_says_what_sglangs_list_says(name: str) -> None:
    tree = ast.parse((SRT / "models" / "deepseek_common" / "utils.py").read_text())
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    (apart,) = (
        ast.literal_eval(node.value)
        for node in lists
        if getattr(node.targets[0], "id", "") == "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"
    )
    file, kind = BACKENDS[name]
    decode = parameters_of(file, kind, "forward_decode")
    assert decode is not None
    assert ("q_rope" in decode) == (name in apart)


class Apart:
    """A backend as FA3 is."""

    def forward_decode(self, q: object, *, q_rope: object = None) -> None:
        """Take it apart."""


class Whole:
    """A backend as Triton's is."""

    def forward_decode(self, q: object) -> None:
        """Take it whole."""


def test_what_is_read_off_a_class() -> None:
    assert _has_q_rope(Apart) and _has_q_rope(type("Child", (Apart,), {})) and not _has_q_rope(Whole)


def test_ours_takes_whole_rows() -> None:
    assert not takes_rotated_apart(World().backend(), ForwardMode.EXTEND)
