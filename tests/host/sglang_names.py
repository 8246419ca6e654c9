"""What our sources use of SGLang, read from their syntax for one SGLang version, and held against that version's wheel.

Checked: imported names; targets of hooks, and that the hook takes what the target takes; attributes of objects whose
class is known (by annotation, by construction, or by the names in ``OBJECTS``); arguments of calls; methods of ours
that override SGLang's; names of server flags. Not checked: what an object of unknown class is asked for.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.host.as_of import AsOf
from tests.host.wheel_source import Definition, External, Found, Function, WheelSource, bindings, signature

SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
#: Variables, parameters and attributes of ours that hold an SGLang object without saying so.
OBJECTS = {
    "server_args": SERVER_ARGS,
    "cfg": SERVER_ARGS,
    "model_config": "sglang.srt.configs.model_config.ModelConfig",
    "runner": "sglang.srt.model_executor.model_runner.ModelRunner",
    "forward_batch": "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
    "spec_info": "sglang.srt.speculative.eagle_info.EagleVerifyInput",
    "fm": "sglang.srt.model_executor.forward_batch_info.ForwardMode",
}
#: The same, in files where the word means nothing else; several classes where any of them may have the attribute.
OBJECTS_OF = {
    "atom_plugin/attention/backend.py": {"layer": "sglang.srt.layers.radix_attention.RadixAttention"},
    "atom_plugin/attention/limits.py": {"layer": "sglang.srt.layers.radix_attention.RadixAttention"},
    "atom_plugin/cpu/communication.py": {"group": "sglang.srt.distributed.parallel_state.GroupCoordinator"},
    "atom_plugin/layers/moe.py": {
        "method": "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod",
        "moe": "sglang.srt.layers.moe.moe_runner.runner.MoeRunner",
    },
    "atom_plugin/host.py": {
        "topk": "sglang.srt.layers.moe.topk.TopK",
        "experts": "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE",
        "pool": "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool",
        "backend": "sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend "
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend "
        "sglang.srt.layers.attention.tbo_backend.TboAttnBackend",
    },
}
#: Classes that are put together, or answer, at run time: where the fields are declared that are theirs.
ASSEMBLED = {
    "ServerArgs": ("sglang.srt.arg_groups.fields",),
    "_ConfigBag": ("sglang.srt.arg_groups.fields", "sglang.srt.server_args"),
    "ParallelContext": ("sglang.srt.arg_groups.fields", "sglang.srt.server_args"),
}
#: Functions of ours that run only where SGLang knows a word; where it does not, nothing calls them.
CALLED_BY_THE_WORD = {"shared_read_ends": "shared_read_ends", "reads_end_before_replay": "shared_read_ends"}


@dataclass
class Report:
    """What was looked at, by kind, and what does not hold, a line each."""

    checked: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def check(sources: dict[str, str], wheel: WheelSource, version: str) -> Report:
    """Hold ``sources`` (path -> text) against the wheel of SGLang ``version``."""
    report = Report()
    trees = {path: AsOf(Version(version)).visit(ast.parse(text)) for path, text in sources.items()}
    for path in trees:
        _File(path, trees, wheel, version, report).check()
    return report


def _flags_since(trees: dict[str, ast.Module]) -> dict[str, str]:
    assigned = [node for node in trees["atom_plugin/host.py"].body if isinstance(node, ast.Assign)]
    (table,) = [node.value for node in assigned if ast.unparse(node.targets[0]) == "FLAGS_SINCE"]
    return ast.literal_eval(table)


class _File:
    """One of our files under one SGLang version."""

    def __init__(
        self, path: str, trees: dict[str, ast.Module], wheel: WheelSource, version: str, report: Report
    ) -> None:
        self.path, self.trees, self.wheel, self.version, self.report = path, trees, wheel, version, report
        self.tree = trees[path]
        self.objects = OBJECTS | OBJECTS_OF.get(path, {})
        self.attributes: dict[str, list[Found]] = {}

    def problem(self, node: ast.AST, text: str) -> None:
        self.report.problems.append(f"{self.path}:{node.lineno}: {text}")  # type: ignore[attr-defined]

    def check(self) -> None:
        """Check every use of the file."""
        names = self.imported(self.tree.body)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Hook":
                self.hook(node)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Flag":
                self.flag(node)
            if isinstance(node, ast.ClassDef):
                self.overrides(node, names)
        self.scope(self.tree.body, names)

    def flag(self, node: ast.Call) -> None:
        """Check that the server has the flag of a row of the refusals from the version on that we say."""
        (name,) = [ast.literal_eval(word.value) for word in node.keywords if word.arg == "field"]
        self.report.checked["flag"] += 1
        is_there = bool(self.attributes_of(self.wheel.find_path(SERVER_ARGS), name))
        if is_there != (Version(self.version) >= Version(_flags_since(self.trees).get(name, "0"))):
            self.problem(node, f"the server has {'already the' if is_there else 'no'} flag {name}")

    def imported(self, body: list[ast.stmt]) -> dict[str, list[Found]]:
        """Return the names that a scope imports from SGLang; a name that is not there is a problem."""
        names: dict[str, list[Found]] = {}
        for statement in body:
            if not isinstance(statement, ast.ImportFrom) or (statement.module or "").split(".")[0] != "sglang":
                continue
            for alias in statement.names:
                self.report.checked["import"] += 1
                found = self.wheel.find(statement.module or "", alias.name)
                names[alias.asname or alias.name] = found
                if not found:
                    self.problem(statement, f"{statement.module} has no {alias.name}")
        return names

    def scope(self, body: list[ast.stmt], outer: dict[str, list[Found]]) -> None:
        """Check the statements of a scope in order, then the scopes inside of it."""
        names = dict(outer)
        inner: list[tuple[ast.AST, dict[str, list[Found]]]] = []
        for node in _in_order(body):
            if isinstance(node, ast.ImportFrom):
                names |= self.imported([node]) if body is not self.tree.body or node not in body else {}
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner.append((node, names))
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                target, found = node.targets[0], self.types_of(node.value, names)
                if isinstance(target, ast.Name):
                    names[target.id] = self.named(target.id) or found
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    self.attributes[target.attr] = found
            elif isinstance(node, ast.Call):
                self.call(node, names)
            elif isinstance(node, ast.Attribute):
                self.attribute(node, names)
        for node, known in inner:
            if isinstance(node, ast.ClassDef):
                self.attributes = {}
                inside = dict(known, **{"super()": self.bases_of(node, known)})
                methods = sorted(node.body, key=lambda one: getattr(one, "name", "") != "__init__")
                self.scope(methods, inside)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and self.is_called(node):
                self.scope(node.body, known | self.parameters(node, known))

    def is_called(self, function: Function) -> bool:
        """Return whether this SGLang can reach ``function``."""
        word = CALLED_BY_THE_WORD.get(function.name)
        return word is None or word in self.wheel.text

    def parameters(self, function: Function, names: dict[str, list[Found]]) -> dict[str, list[Found]]:
        """Return the types of a function's parameters."""
        arguments = function.args
        return {
            one.arg: _instances(names.get(ast.unparse(one.annotation), []) if one.annotation else [])
            or self.named(one.arg)
            for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        }

    def named(self, name: str) -> list[Found]:
        """Return the class of an object of SGLang's that we call ``name``."""
        if name not in self.objects:
            return []
        found = [one for path in self.objects[name].split() for one in self.wheel.find_path(path)]
        assert found, f"OBJECTS: SGLang {self.version} has no {self.objects[name]}"
        return _instances(found)

    def values_of(self, node: ast.expr, names: dict[str, list[Found]]) -> list[Found]:
        """Return the SGLang functions, classes and modules that an expression names."""
        if isinstance(node, ast.Name):
            return names.get(node.id, [])
        if isinstance(node, ast.Attribute):
            return self.attributes_of(self.types_of(node.value, names) or self.values_of(node.value, names), node.attr)
        return []

    def types_of(self, node: ast.expr, names: dict[str, list[Found]]) -> list[Found]:
        """Return the SGLang classes that the value of an expression may have; empty where it is not known."""
        if isinstance(node, ast.Name):
            return names[node.id] if node.id in names else self.named(node.id)
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) == "self" and node.attr in self.attributes:
                return self.attributes[node.attr]
            found = self.attributes_of(self.types_of(node.value, names), node.attr)
            types = [
                one for value in found if isinstance(value, Definition) for one in self.wheel.type_of_attribute(value)
            ]
            return self.named(node.attr) or types
        if isinstance(node, ast.Call):
            if ast.unparse(node) == "super()":
                return names.get("super()", [])
            made: list[Found] = []
            for value in self.values_of(node.func, names):
                if isinstance(value, Definition):
                    is_class = isinstance(value.node, ast.ClassDef)
                    made += [value] if is_class else self.wheel.type_of_attribute(value)
            return made
        return []

    def attributes_of(self, owners: list[Found], name: str) -> list[Found]:
        """Return what ``owner.name`` may be."""
        found = [one for owner in owners for one in self.wheel.attribute(owner, name)]
        for owner in owners if not found else []:
            for module in ASSEMBLED.get(owner.node.name, ()) if _is_class(owner) else ():  # type: ignore[union-attr]
                found += [External(f"{module}: {name}")] if name in self.wheel.fields(module) else []
        return found

    def attribute(self, node: ast.Attribute, names: dict[str, list[Found]]) -> None:
        """Check that an object of a known class has the attribute that is read."""
        owners = self.types_of(node.value, names)
        if not owners or isinstance(node.ctx, ast.Store):
            return
        self.report.checked["attribute"] += 1
        if not self.attributes_of(owners, node.attr):
            self.problem(node, f"{ast.unparse(node.value)}: {_told(owners)} has no {node.attr}")

    def call(self, node: ast.Call, names: dict[str, list[Found]]) -> None:
        """Check that the arguments of a call bind to what is called."""
        found = self.values_of(node.func, names)
        if not found and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self":
            owners = self.attributes.get(node.func.attr, [])  # a module that we have built: its forward
            found = [one for owner in owners for one in self.wheel.attribute(owner, "forward")]
        for one in found:
            theirs = self.callable_signature(one)
            if theirs is None:
                continue
            self.report.checked["call"] += 1
            keywords = [self.keywords(word) for word in node.keywords]
            is_open = any(isinstance(arg, ast.Starred) for arg in node.args) or None in keywords
            bind = theirs.bind_partial if is_open else theirs.bind
            words = dict.fromkeys(name for names_of_one in keywords for name in names_of_one or ())
            try:
                bind(*[None for arg in node.args if not isinstance(arg, ast.Starred)], **words)
            except TypeError as error:
                self.problem(node, f"{ast.unparse(node.func)}{theirs} of {_told([one])}: {error}")

    def keywords(self, word: ast.keyword) -> list[str] | None:
        """Return the names that one keyword passes, those of a dict from host.py too; None where they are not known."""
        if word.arg:
            return [word.arg]
        if not isinstance(word.value, ast.Call) or not ast.unparse(word.value.func).startswith("host."):
            return None
        (function,) = bindings(self.trees["atom_plugin/host.py"].body)[ast.unparse(word.value.func)[len("host.") :]]
        (keys,) = [node.value.keys for node in ast.walk(function) if isinstance(node, ast.Return)]  # type: ignore[union-attr]
        return [ast.literal_eval(key) for key in keys]

    def callable_signature(self, one: Found) -> inspect.Signature | None:
        """Return the signature of a function, a method (as it is called) or a class; None where it is not known."""
        if not isinstance(one, Definition):
            return None
        if isinstance(one.node, ast.ClassDef):
            return None if self.is_enum(one) else self.wheel.constructor(one)
        if not isinstance(one.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        tree = self.wheel.tree(one.module)
        assert tree is not None
        is_method = one.node not in [node for nodes in bindings(tree.body).values() for node in nodes]
        return signature(one.node, bound=is_method)

    def is_enum(self, one: Definition) -> bool:
        assert isinstance(one.node, ast.ClassDef)
        return any("Enum" in ast.unparse(base) for base in one.node.bases)

    def hook(self, node: ast.Call) -> None:
        """Check that a hook's target is there, and that the hook takes what its target takes."""
        words = {word.arg: word.value for word in node.keywords}
        if "versions" in words:
            versions = SpecifierSet(ast.literal_eval(words["versions"]))
            if not versions.contains(self.version):
                return
        self.report.checked["hook"] += 1
        target, kind = ast.literal_eval(words["target"]), ast.literal_eval(words["kind"])
        found = self.wheel.find_path(target)
        if not found:
            self.problem(node, f"hook target {target} is not there")
        ours = self.our_signature(words["hook"])
        if kind != "replace":
            ours = ours.replace(parameters=list(ours.parameters.values())[1:])  # original, or result
        for one in found:
            if isinstance(one, Definition) and isinstance(one.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for why in _why_not_in_place_of(ours, signature(one.node)):
                    self.problem(node, f"hook on {target}{signature(one.node)} takes {ours}: {why}")

    def our_signature(self, expression: ast.expr) -> inspect.Signature:
        """Return the signature of a hook of ours: a lambda, a function of the file, or module.function."""
        if isinstance(expression, ast.Lambda):
            args = ast.FunctionDef("hook", expression.args, [], [], None)
            return signature(args)
        module, _, name = ast.unparse(expression).rpartition(".")
        body = self.tree.body
        if module:
            folder = self.path.rpartition("/")[0]
            body = self.trees[f"{folder}/{module}.py"].body
        (function,) = bindings(body)[name]
        assert isinstance(function, ast.FunctionDef)
        return signature(function)

    def bases_of(self, node: ast.ClassDef, names: dict[str, list[Found]]) -> list[Found]:
        return [one for base in node.bases for one in self.values_of(base, names)]

    def overrides(self, node: ast.ClassDef, names: dict[str, list[Found]]) -> None:
        """Check that methods of ours take what the methods that they override take."""
        bases = self.bases_of(node, names)
        ours = {name: nodes[0] for name, nodes in bindings(node.body).items()}
        for name, method in ours.items():
            theirs = [one for base in bases for one in self.wheel.attribute(base, name)]
            for one in theirs:
                is_function = isinstance(one, Definition) and isinstance(one.node, ast.FunctionDef)
                if not is_function or not isinstance(method, ast.FunctionDef) or name == "__init__":
                    continue
                self.report.checked["override"] += 1
                for why in _why_not_in_place_of(signature(method), signature(one.node)):  # type: ignore[union-attr]
                    self.problem(method, f"{node.name}.{name} overrides {signature(one.node)}: {why}")  # type: ignore[union-attr]


def _in_order(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, those of a statement before the assignment that it makes, without inner scopes."""
    for statement in body:
        blocks: list[ast.stmt] = []
        pending: list[ast.AST] = [statement]
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            pending = []
        while pending:
            node = pending.pop()
            for child in ast.iter_child_nodes(node):
                (blocks if isinstance(child, ast.stmt) else pending).append(child)  # type: ignore[arg-type]
            if node is not statement:
                yield node
        yield statement
        yield from _in_order(blocks)


def _is_class(one: Found) -> bool:
    return isinstance(one, Definition) and isinstance(one.node, ast.ClassDef)


def _instances(found: list[Found]) -> list[Found]:
    return [one for one in found if _is_class(one)]


def _told(found: list[Found]) -> str:
    return " or ".join(
        one.path if isinstance(one, External) else f"{one.module}.{getattr(one.node, 'name', '')}" for one in found
    )


def _why_not_in_place_of(ours: inspect.Signature, theirs: inspect.Signature) -> list[str]:
    """Return why ``ours`` cannot stand for ``theirs``: with all arguments by position, and with the required ones."""
    kind = inspect.Parameter
    plain = [
        one for one in theirs.parameters.values() if one.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)
    ]
    words = [one for one in theirs.parameters.values() if one.kind is kind.KEYWORD_ONLY]
    problems = []
    for wanted in (lambda one: True, lambda one: one.default is kind.empty):
        try:
            ours.bind(*filter(wanted, plain), **{one.name: None for one in words if wanted(one)})
        except TypeError as error:
            problems.append(str(error))
    return problems
