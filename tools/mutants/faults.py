"""Which small faults can be planted in a source file, and which of them a run takes.

A fault changes one place: a comparison, an operator, a number, a boolean, a condition, a returned value; it
swaps min and max, or the branches of a choice; it drops a statement, a keyword argument or a conversion.
Nothing is planted in what only people read: docstrings, logs, texts of errors and events, annotations.
"""

import ast
import copy
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

OPERATORS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
SWAPPED = {
    name: other
    for pair in ("min max", "amin amax", "minimum maximum", "any all", "floor ceil", "startswith endswith")
    for name, other in (pair.split(), pair.split()[::-1])
}
CONVERSIONS = re.compile("detach|clone|float|double|long|contiguous|abs|exp|log|square|sqrt|strip|lower|copy")
"""Methods without an argument that can be left out."""
TOLD = re.compile(r"(logger|logging|warnings|EVENTS)\..*|print|cast|.*(Error|Exception|Warning|Refused)")
"""Calls that make what people read; exceptions among them."""
UNSEEN = re.compile(r".*(cache|jit)\b.*")
"""Decorators of functions that do not run in each test that needs them."""
READ_BY_PEOPLE = ("__repr__", "__str__")


@dataclass(frozen=True)
class Fault:
    """One change of one file.

    Example: Fault("megatron_rl_corr/core/weights.py", "bounded", "a < b -> a <= b", 31, (30, 33), True, ...)
    """

    file: str
    function: str
    """With its class, as in "SpanSums.products"; "" at the top of the file."""
    change: str
    line: int
    lines: tuple[int, int]
    """First and last line of its statement: a test that runs one of them may find it."""
    watched: bool
    """Whether its lines run whenever a test uses them: not at the import only, nor behind a cache."""
    place: tuple[int, int]
    """Of the bytes that `text` replaces."""
    text: str

    @property
    def name(self) -> tuple[str, str, str]:
        """What stays when lines move."""
        return self.file, self.function, self.change

    def planted(self, source: bytes) -> bytes:
        start, end = self.place
        return source[:start] + self.text.encode() + source[end:]


def faults_of(file: str, source: bytes) -> list[Fault]:
    """All faults of a file, in the order of their lines."""
    found = _Finder(file, source)
    found.visit(ast.parse(source))
    return found.faults


def choose(faults: dict[str, list[Fault]], count: int, seed: int) -> list[Fault]:
    """`count` faults, as evenly over the files as they have them; the same ones for the same seed.

    Within a file each function has its turn, so that a long one does not take all.
    """
    queues = {}
    for file, found in sorted(faults.items()):
        chance = random.Random(f"{seed} {file}")
        by_function: dict[str, list[Fault]] = {}
        for fault in chance.sample(found, len(found)):
            by_function.setdefault(fault.function, []).append(fault)
        queues[file] = [f for turn in _turns(by_function.values()) for f in turn]
    return sorted(
        [f for turn in _turns(queues.values()) for f in turn][:count], key=lambda f: (f.file, f.line)
    )


def _turns(queues) -> Iterator[list[Fault]]:
    for turn in range(max(map(len, queues), default=0)):
        yield [queue[turn] for queue in queues if turn < len(queue)]


class _Finder(ast.NodeVisitor):
    """Walks a file and notes what can be changed."""

    def __init__(self, file: str, source: bytes):
        self.faults: list[Fault] = []
        self._file, self._names, self._watched, self._lines = file, [], False, (0, 0)
        self._around: list[ast.AST] = []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _note(self, node, text: str, change: str, end=None) -> None:
        end = end or node
        place = (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[end.end_lineno - 1] + end.end_col_offset,
        )
        name = ".".join(self._names)
        self.faults.append(
            Fault(self._file, name, change, node.lineno, self._lines, self._watched, place, text)
        )

    def _replace(self, node, new: ast.AST | str, **fields) -> None:
        if fields:
            new = copy.copy(node)
            vars(new).update(fields)
        text = new if isinstance(new, str) else ast.unparse(new)
        within = f" in {ast.unparse(self._around[-2])}" if isinstance(node, ast.Constant) else ""
        self._note(node, f"({text})", f"{ast.unparse(node)} -> {text}{within}")

    def _drop(self, statement) -> None:
        self._note(statement, "pass", f"{ast.unparse(statement)} -> dropped")

    def visit(self, node):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.ClassDef):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
            self._lines = (node.lineno, last)
        self._around.append(node)
        super().visit(node)
        self._around.pop()

    def visit_FunctionDef(self, node):
        defaults = [value for value in (*node.args.defaults, *node.args.kw_defaults) if value is not None]
        if node.name in READ_BY_PEOPLE:
            return
        self._names.append(node.name)
        watched = self._watched
        for value in defaults:
            self.visit(value)
        self._watched = not any(UNSEEN.match(ast.unparse(mark)) for mark in node.decorator_list)
        for statement in node.body:
            self.visit(statement)
        self._watched = watched
        self._names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node):
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def visit_Lambda(self, node):
        before = self._watched, self._lines
        self._watched, self._lines = True, (node.lineno, node.end_lineno)
        self.visit(node.body)
        self._watched, self._lines = before

    def visit_Expr(self, node):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not TOLD.fullmatch(ast.unparse(call.func)):
            self._drop(node)
        self.generic_visit(node)

    def visit_Raise(self, node):
        self._drop(node)

    def visit_Continue(self, node):
        self._drop(node)

    visit_Break = visit_Continue

    def visit_Assign(self, node):
        if not all(isinstance(target, ast.Name | ast.Tuple) for target in node.targets):
            self._drop(node)
        self.visit(node.value)

    def visit_AugAssign(self, node):
        self._drop(node)
        for other in OPERATORS.get(type(node.op), ()):
            new = ast.AugAssign(node.target, other(), node.value)
            self._note(node, ast.unparse(new), f"{ast.unparse(node)} -> {ast.unparse(new)}")
        self.visit(node.value)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_Return(self, node):
        if node.value is not None and ast.unparse(node.value) != "None":
            self._note(node, "return None", f"{ast.unparse(node)} -> return None")
            self.visit(node.value)

    def visit_If(self, node):
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
            self._replace(node.test, f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self._replace(node, None, body=node.orelse, orelse=node.body)
        self.generic_visit(node)

    def visit_Compare(self, node):
        for other in OPERATORS.get(type(node.ops[0]), ()):
            self._replace(node, None, ops=[other(), *node.ops[1:]])
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right)):
            for other in OPERATORS.get(type(node.op), ()):
                self._replace(node, None, op=other())
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self._replace(node, None, op=OPERATORS[type(node.op)][0]())
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self._replace(node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node):
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int | float):
            self._replace(node, repr(value + 1 if isinstance(value, int) or not value else value * 2))

    def visit_comprehension(self, node):
        for test in node.ifs:
            self._note(test, "True", f"if {ast.unparse(test)} -> dropped")
        self.generic_visit(node)

    def visit_Call(self, node):
        name = ast.unparse(node.func)
        if TOLD.fullmatch(name):
            return
        head, _, last = name.rpartition(".")
        if last in SWAPPED:
            self._replace(node, None, func=ast.Name(f"{head}.{SWAPPED[last]}".removeprefix(".")))
        if CONVERSIONS.fullmatch(last) and head and not node.args:
            self._replace(node, node.func.value)
        if last == "where" and len(node.args) == 3:
            self._replace(node, None, args=[node.args[0], node.args[2], node.args[1]])
        for keyword in node.keywords:
            if keyword.arg:
                kept = [one for one in node.keywords if one is not keyword]
                new = ast.unparse(ast.Call(node.func, node.args, kept))
                self._note(node, new, f"{ast.unparse(keyword)} of {name} -> dropped")
                if keyword.arg in ("min", "max") and not kept:
                    new = ast.Call(node.func, node.args, [ast.keyword(SWAPPED[keyword.arg], keyword.value)])
                    self._replace(node, new)
        self.generic_visit(node)

    def _skip(self, node):
        pass

    visit_JoinedStr = visit_Assert = visit_Import = visit_ImportFrom = _skip


def _is_text(node) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
