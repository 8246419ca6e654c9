"""Only configs/ reads the fields of a Hugging Face config, and nobody reads one with a hidden default."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.configs import fixtures

REPO = Path(__file__).parents[2]
#: The links atom_plugin/configs and atom_plugin/models are not followed: models/ is walked by itself.
OUTSIDE = [
    path
    for path in sorted([*(REPO / "atom_plugin").rglob("*.py"), *(REPO / "models").rglob("*.py")])
    if not path.is_relative_to(REPO / "atom_plugin" / "configs")
    and not path.is_relative_to(REPO / "atom_plugin" / "models")
]
#: What a Hugging Face config is called; ``model_config`` is SGLang's own object with fields of its own.
CONFIGS = frozenset(
    ["config", "get_text_config", "hf_cfg", "hf_config", "hf_text_config", "raw", "raw_config", "text_config"]
)


def all_keys(value: Any) -> set[str]:
    """Return the names of all fields in ``value``, nested ones too."""
    if isinstance(value, dict):
        return set(value) | {name for item in value.values() for name in all_keys(item)}
    return set()


#: Every field of every published config that we know, by both spellings.
FIELDS = {
    name
    for config in [*map(fixtures.read, fixtures.names()), fixtures.fragments()]
    for name in all_keys(config)
    if len(name) > 4 and name.isidentifier()
}


def last_name(node: ast.expr) -> str:
    """Return what the value of an expression is called: ``c`` of ``a.b.c``, ``a`` of ``a``, ``f`` of ``f()``."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def field_of(node: ast.expr | None) -> str:
    """Return the field that a constant names, or ""."""
    return node.value if isinstance(node, ast.Constant) and node.value in FIELDS else ""


def bindings(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value) of every assignment, those of ``with`` and of ``:=`` as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield node.optional_vars, node.context_expr


def called_configs(tree: ast.AST) -> frozenset[str]:
    """Return CONFIGS and every name that ``tree`` gives one of them, whatever its scope."""
    called, pairs = CONFIGS, list(bindings(tree))
    while True:
        more = {last_name(target) for target, value in pairs if is_config(value, called)} - called - {""}
        if not more:
            return called
        called |= more


def is_config(value: ast.expr, called: frozenset[str]) -> bool:
    """Return whether an expression is, or may be, what is ``called`` a config."""
    if isinstance(value, ast.BoolOp):
        return any(is_config(each, called) for each in value.values)
    if isinstance(value, ast.IfExp):
        return is_config(value.body, called) or is_config(value.orelse, called)
    if isinstance(value, ast.Call) and last_name(value) in ("copy", "deepcopy") and value.args:
        return is_config(value.args[0], called)
    return last_name(value) in called


def problems(source: str) -> Iterator[str]:
    """Yield what ``source`` reads of a config: an attribute, a key, get, getattr, hasattr, attrgetter or vars."""
    tree = ast.parse(source)
    called = called_configs(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in FIELDS:
            if last_name(node.value) in called:
                yield f"line {node.lineno}: reads {ast.unparse(node)}"
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and field_of(node.slice):
            yield f"line {node.lineno}: reads {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and node.args:
            function, first = last_name(node.func), node.args[0]
            if function in ("get", "pop", "setdefault") and isinstance(node.func, ast.Attribute) and field_of(first):
                yield f"line {node.lineno}: reads {ast.unparse(node)}"
            if function in ("getattr", "hasattr") and last_name(first) in called | {"model_config"}:
                yield f"line {node.lineno}: looks for a field by {ast.unparse(node)}"
            if function == "vars" and last_name(first) in called:
                yield f"line {node.lineno}: takes all fields by {ast.unparse(node)}"
            if function in ("getattr", "hasattr") and len(node.args) > 1 and field_of(node.args[1]):
                yield f"line {node.lineno}: reads a field of whatever it is by {ast.unparse(node)}"
            if function == "attrgetter" and any(map(field_of, node.args)):
                yield f"line {node.lineno}: reads a field of whatever it is by {ast.unparse(node)}"


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(REPO)))
def test_fields_are_read_in_configs_alone(path: Path) -> None:
    """Everything after configs/ works from a frozen spec."""
    assert list(problems(path.read_text())) == []


def test_the_check_walks_all_of_it() -> None:
    """Models, layers and bridge are in the list, configs is not."""
    names = {str(path.relative_to(REPO)) for path in OUTSIDE}
    assert {"models/qwen3.py", "atom_plugin/refusals.py", "atom_plugin/layers/rope.py"} <= names
    assert not [name for name in names if "configs/" in name]
    assert {"hidden_size", "rope_theta", "num_local_experts", "kda_layers", "weight_block_size"} <= FIELDS


@pytest.mark.parametrize(
    "planted",
    [
        "x = getattr(config, 'sliding_window', None)",
        "x = getattr(self.config, 'anything', 0)",
        "x = getattr(model_config, 'head_dim', 128)",
        "x = getattr(thing, 'rope_theta', 10000)",
        "x = getattr(config, name)",
        "x = config.hidden_size",
        "x = self.config.num_experts",
        "x = runner.model_config.hf_config.rope_scaling",
        "x = config.text_config.num_hidden_layers",
        "x = config.to_dict()['num_hidden_layers']",
        "x = hf_config.rope_parameters['rope_theta']",
        "x = raw['quantization_config']",
        "x = values.get('rope_scaling')",
        "x = values.pop('torch_dtype', None)",
        "x = vars(hf_config)",
        "if hasattr(config, 'text_config'): pass",
        "cfg = model_config.hf_config\nx = cfg.hidden_size",
        "c = self.config\nx = c.num_experts",
        "c: Any = self.config\nd = c\nx = d.rope_scaling",
        "self.c = config\nx = self.c.num_hidden_layers",
        "if (c := runner.hf_config) and c.rope_theta: pass",
        "c = config or hf_config\nx = c.hidden_size",
        "c = config if nested else config.text_config\nx = c.hidden_size",
        "c = copy.deepcopy(config)\nx = c.hidden_size",
        "c = config\nx = getattr(c, name)",
        "x = getattr(c, 'rope_theta')",
        "x = getattr(anything(), 'rope_theta', 10000)",
        "if hasattr(c, 'num_local_experts'): pass",
        "x = attrgetter('hidden_size')(c)",
        "x = config.get_text_config().hidden_size",
        "x = model_config.get_text_config(decoder=True).hidden_size",
        "c = config.get_text_config()\nx = c.hidden_size",
        "x = model_config.hf_cfg.hidden_size",
        "def f(self):\n    return [self.config.intermediate_size for _ in range(3)]",
    ],
)
def test_a_planted_violation_is_found(planted: str) -> None:
    """The check can fail."""
    assert len(list(problems(planted))) >= 1


@pytest.mark.parametrize(
    "fine",
    [
        "x = spec.hidden_size",
        "x = model_config.head_dim",
        "x = self.spec.rope.theta",
        "widths = {'intermediate_size': 3}",
        "widths['moe_intermediate_size'] = 4",
        "x = config.to_dict()",
        "x = config.splits",
        "c = load_spec(config)\nx = c.hidden_size",
        "x = getattr(layer, 'qkv_proj')",
        "self.config = config",
    ],
)
def test_what_is_no_violation(fine: str) -> None:
    """Specs, SGLang's ModelConfig, labels, and a launch configuration of a kernel."""
    assert list(problems(fine)) == []
