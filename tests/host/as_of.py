"""Our sources as one SGLang version runs them: without what ``since`` leaves to the others."""

from __future__ import annotations

import ast

from packaging.version import Version


class AsOf(ast.NodeTransformer):
    """Takes out what ``since("...")`` says is not run by ``version``, and what follows a return."""

    def __init__(self, version: Version) -> None:
        self.version = version

    def truth(self, test: ast.expr) -> bool | None:
        """Return whether ``test`` holds, None where it is not about the version alone."""
        if isinstance(test, ast.Call) and ast.unparse(test.func).rpartition(".")[2] == "since":
            (first,) = test.args
            return self.version >= Version(str(first.value)) if isinstance(first, ast.Constant) else None
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.truth(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts = {self.truth(part) for part in test.values}
            decides = isinstance(test.op, ast.Or)
            return decides if decides in parts else None if None in parts else not decides
        return None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Visit the children, then cut each list of statements at its first return or raise."""
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            held = getattr(node, name, None)
            if isinstance(held, list):
                ends = [index for index, one in enumerate(held) if isinstance(one, (ast.Return, ast.Raise))]
                setattr(node, name, held[: ends[0] + 1] if ends else held)
        return node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        """Keep the branch that runs, as statements of the scope around it."""
        truth = self.truth(node.test)
        if truth is None:
            return self.generic_visit(node)
        held = ast.Module(body=node.body if truth else node.orelse, type_ignores=[])
        return self.generic_visit(held).body  # type: ignore[attr-defined]

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Keep the value that is taken."""
        truth = self.truth(node.test)
        return self.generic_visit(node) if truth is None else self.visit(node.body if truth else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Drop what is not evaluated after a version test."""
        for index, part in enumerate(node.values):
            if self.truth(part) is isinstance(node.op, ast.Or):
                node.values = node.values[: index + 1]
                break
        return self.generic_visit(node)
