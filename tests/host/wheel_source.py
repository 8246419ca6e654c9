"""The Python source of an unpacked wheel: where a name is defined, and with which signature. Nothing is imported."""

from __future__ import annotations

import ast
import functools
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Compound statements, whose parts bind in the scope that they stand in.
COMPOUND = (ast.If, ast.Try, ast.With, ast.For, ast.While)


@dataclass(frozen=True)
class Definition:
    """Where ``node`` stands: a function, a class, an assignment, or, as a module, the tree itself."""

    module: str
    node: ast.AST


@dataclass(frozen=True)
class External:
    """A name of another package than the wheel's."""

    path: str


Found = Definition | External


def statements(body: list[ast.stmt], *, typing_only: bool) -> Iterator[ast.stmt]:
    """Yield the statements of one scope, those in branches included; ``if TYPE_CHECKING`` only where it is asked."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test) and not typing_only:
            yield from statements(statement.orelse, typing_only=typing_only)
        elif isinstance(statement, COMPOUND):
            parts = [part for part in ("body", "orelse", "finalbody") if part in statement._fields]
            for part in parts:
                yield from statements(getattr(statement, part), typing_only=typing_only)
            for handler in statement.handlers if isinstance(statement, ast.Try) else ():
                yield from statements(handler.body, typing_only=typing_only)
        else:
            yield statement


def bindings(body: list[ast.stmt], *, typing_only: bool = False) -> dict[str, list[ast.AST]]:
    """Return what each name of one scope is bound by; annotations without a value count, as fields of classes."""
    bound: dict[str, list[ast.AST]] = {}
    for statement in statements(body, typing_only=typing_only):
        names: list[str] = []
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [statement.name]
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name.split(".")[0] for alias in statement.names]
        elif isinstance(statement, ast.Assign):
            names = [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names = [statement.target.id]
        for name in names:
            bound.setdefault(name, []).append(statement)
    return bound


def signature(function: Function, *, bound: bool = False) -> inspect.Signature:
    """Return the signature that ``def`` writes; ``bound`` leaves out what a call through the object fills in."""
    arguments, kind = function.args, inspect.Parameter
    plain = [(one, kind.POSITIONAL_ONLY) for one in arguments.posonlyargs]
    plain += [(one, kind.POSITIONAL_OR_KEYWORD) for one in arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    params = [
        kind(one.arg, how, default=None if index >= first_default else kind.empty)
        for index, (one, how) in enumerate(plain)
    ]
    if arguments.vararg:
        params.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        params.append(kind(one.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None))
    if arguments.kwarg:
        params.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    decorators = {ast.unparse(one) for one in function.decorator_list}
    return inspect.Signature(params[1:] if bound and "staticmethod" not in decorators else params)


class WheelSource:
    """The modules below ``folder``, parsed when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = functools.cache(self._tree)
        self.fields = functools.cache(self._fields)
        self._looking: set[tuple[str, str]] = set()  # a package's __init__ may import a name from itself

    def _tree(self, module: str) -> ast.Module | None:
        base = self.folder.joinpath(*module.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return ast.parse(path.read_text())
        return None

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        package = module.split(".")
        is_package = (self.folder.joinpath(*package) / "__init__.py").is_file()
        kept = package[: len(package) - statement.level + is_package]
        return ".".join([*kept, *([statement.module] if statement.module else [])])

    def find(self, module: str, name: str, *, typing_only: bool = False) -> list[Found]:
        """Return every definition that ``from module import name`` may give, through re-exports; empty for none."""
        tree = self.tree(module)
        if tree is None:
            return [] if module.split(".")[0] == "sglang" else [External(f"{module}.{name}")]
        found: list[Found] = []
        if (module, name) not in self._looking:
            self._looking.add((module, name))
            bound = bindings(tree.body, typing_only=typing_only)
            found = [one for node in bound.get(name, []) for one in self._follow(module, node, name, typing_only)]
            for node in bound.get("*", []) if not found else []:
                if isinstance(node, ast.ImportFrom):
                    found += self.find(self._origin(module, node), name, typing_only=typing_only)
            self._looking.remove((module, name))
        submodule = self.tree(f"{module}.{name}")
        if not found and submodule is not None:
            found = [Definition(f"{module}.{name}", submodule)]
        return found

    def _follow(self, module: str, node: ast.AST, name: str, typing_only: bool) -> list[Found]:
        if isinstance(node, ast.ImportFrom):
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return self.find(self._origin(module, node), original, typing_only=typing_only)
        if isinstance(node, ast.Import):
            alias = next(one for one in node.names if (one.asname or one.name.split(".")[0]) == name)
            target = alias.name if alias.asname else name
            tree = self.tree(target)
            return [External(target) if tree is None else Definition(target, tree)]
        return [Definition(module, node)]

    def find_path(self, path: str) -> list[Found]:
        """Return the definitions of a dotted path: module, then names in it, then attributes of classes."""
        parts = path.split(".")
        split = max((n for n in range(1, len(parts)) if self.tree(".".join(parts[:n])) is not None), default=0)
        found = self.find(".".join(parts[:split]), parts[split]) if split else []
        for name in parts[split + 1 :]:
            found = [attribute for one in found for attribute in self.attribute(one, name)]
        return found

    def value_of(self, module: str, expression: ast.expr) -> list[Found]:
        """Return the definitions of a dotted expression, as a base class or an annotation of ``module`` names it."""
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            expression = ast.parse(expression.value, mode="eval").body
        if isinstance(expression, ast.BinOp):  # X | None
            return [*self.value_of(module, expression.left), *self.value_of(module, expression.right)]
        if isinstance(expression, ast.Subscript) and ast.unparse(expression.value) == "Optional":
            return self.value_of(module, expression.slice)
        if isinstance(expression, ast.Attribute):
            return [
                one for root in self.value_of(module, expression.value) for one in self.attribute(root, expression.attr)
            ]
        return self.find(module, expression.id, typing_only=True) if isinstance(expression, ast.Name) else []

    def attribute(self, owner: Found, name: str) -> list[Found]:
        """Return what attribute ``name`` of a module, a class or an instance of it may be; empty for none."""
        if isinstance(owner, External):
            return [External(f"{owner.path}.{name}")] if _has(owner.path, name) else []
        if isinstance(owner.node, ast.Module):
            return self.find(owner.module, name)
        if not isinstance(owner.node, ast.ClassDef):
            return []
        own = bindings(owner.node.body, typing_only=True).get(name, [])
        own = own or [node for node in ast.walk(owner.node) if _assigns(node, name)]
        if own:
            return [Definition(owner.module, node) for node in own]
        return [one for base in self.bases(owner) for one in self.attribute(base, name)]

    def bases(self, owner: Definition) -> list[Found]:
        """Return the base classes that the source names."""
        assert isinstance(owner.node, ast.ClassDef)
        return [one for base in owner.node.bases for one in self.value_of(owner.module, base)]

    def type_of_attribute(self, attribute: Definition) -> list[Found]:
        """Return the class that an annotated field, a property or a method says that it gives."""
        node = attribute.node
        annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            annotation = node.returns
        found = [] if annotation is None else self.value_of(attribute.module, annotation)
        return [one for one in found if isinstance(one, Definition) and isinstance(one.node, ast.ClassDef)]

    def constructor(self, owner: Definition) -> inspect.Signature | None:
        """Return the signature of calling a class, None where it is another package's."""
        assert isinstance(owner.node, ast.ClassDef)
        for function in bindings(owner.node.body).get("__init__", []):
            assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            return signature(function, bound=True)
        if any("dataclass" in ast.unparse(one) for one in owner.node.decorator_list):
            return _fields_signature(owner.node)
        inherited = [
            self.constructor(base)
            for base in self.bases(owner)
            if isinstance(base, Definition) and isinstance(base.node, ast.ClassDef)
        ]
        return next((one for one in inherited if one is not None), None)

    @functools.cached_property
    def text(self) -> str:
        """Return all of the wheel's Python source."""
        return "\n".join(path.read_text() for path in sorted((self.folder / "sglang").rglob("*.py")))

    def _fields(self, module: str) -> set[str]:
        """Return what the classes of ``module``, or of a package's modules, declare; none where it is not there."""
        base = self.folder.joinpath(*module.split("."))
        paths = sorted(base.glob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
        nodes = [node for path in paths if path.is_file() for node in ast.walk(ast.parse(path.read_text()))]
        return {name for node in nodes if isinstance(node, ast.ClassDef) for name in bindings(node.body)}


def _has(path: str, name: str) -> bool:
    """Return whether ``path``, of an installed package, has ``name``, or its instances have."""
    try:
        inspect.getattr_static(pkgutil.resolve_name(path), name)
    except (ImportError, AttributeError):
        return False
    return True


def _assigns(node: ast.AST, name: str) -> bool:
    """Return whether a statement sets ``self.name``."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(
        isinstance(one, ast.Attribute) and one.attr == name and ast.unparse(one.value) == "self"
        for target in targets
        for one in ast.walk(target)
    )


def _fields_signature(node: ast.ClassDef) -> inspect.Signature:
    kind = inspect.Parameter
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    return inspect.Signature(
        [
            kind(one.target.id, kind.KEYWORD_ONLY, default=kind.empty if one.value is None else None)
            if "kw_only=True" in "".join(map(ast.unparse, node.decorator_list))
            else kind(one.target.id, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if one.value is None else None)
            for one in fields
            if isinstance(one.target, ast.Name)
        ]
    )
