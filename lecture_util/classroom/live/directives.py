"""A source file as the stepper sees it: its statements, its functions, and what its comments ask.

    # @inspect x, y.shape   show these values once the line has run
    # @clear x              stop showing x
    # @stepover             do not follow the calls that this line makes
    # @hide                 show neither this line nor what is in it

The names follow the convention of executable lectures. A comment on a line of its own belongs to
the line above; one on a `def` line is obeyed on entry.
"""

from __future__ import annotations

import ast
import io
import linecache
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType

DIRECTIVE = re.compile(r"(?:#|\s)\s*@(inspect|clear|stepover|hide)\b")
Span = tuple[int, int]


@dataclass(frozen=True)
class Inspect:
    """One expression to look at; `code` is None where it isn't Python."""

    name: str
    code: CodeType | None

    @classmethod
    def of(cls, text: str) -> Inspect:
        try:
            return cls(text, compile(text, "<inspect>", "eval"))
        except (SyntaxError, ValueError):
            return cls(text, None)


@dataclass
class Source:
    """One file: a step is a statement, so a call written over five lines is one step."""

    lines: list[str]
    statement_at: dict[int, Span] = field(default_factory=dict)
    function_at: dict[int, Span] = field(default_factory=dict)  # from its first line
    inspect: dict[int, list[Inspect]] = field(default_factory=dict)
    clear: dict[int, list[str]] = field(default_factory=dict)
    stepover: set[int] = field(default_factory=set)
    hidden: set[int] = field(default_factory=set)
    folded: set[int] = field(default_factory=set)  # a docstring's lines after its first
    comments: dict[int, int] = field(default_factory=dict)  # line -> column its directive starts at

    def statement(self, line: int) -> Span:
        return self.statement_at.get(line, (line, line))

    def function(self, first: int) -> Span:
        """The lines of the function whose code starts here; of a lambda, its statement."""
        return self.function_at.get(first) or self.statement(first)

    def has_directives(self, span: Span) -> bool:
        lines = {*self.inspect, *self.clear, *self.stepover}
        return any(span[0] <= line <= span[1] for line in lines)

    def shown(self, span: Span) -> list[int]:
        """The numbers of the lines to show."""
        last = min(span[1], len(self.lines))
        return [n for n in range(span[0], last + 1) if n not in self.hidden | self.folded]

    def text(self) -> str:
        """The whole file, without the directives."""
        lines = [line.rstrip("\n") for line in self.lines]
        for number, column in self.comments.items():
            lines[number - 1] = lines[number - 1][:column].rstrip()
        return "\n".join(lines)


def read(filename: str, module_globals: dict | None = None) -> Source:
    """The file's text from disk or from a notebook's cell, and what is to be done with it.

    Text that is not Python as it stands (a cell with magics) still has lines to step through.
    """
    linecache.checkcache(filename)
    lines = linecache.getlines(filename, module_globals)
    source = Source(lines)
    try:
        nodes = list(ast.walk(ast.parse("".join(lines))))
        comments = list(_comments(lines))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return source
    extent: dict[int, Span] = {}
    for node in nodes:  # from the outside in, so that the innermost statement wins
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            _statement(node, source, extent)
    for number, column, words, alone in comments:
        _directive(source, extent, number, column, words, alone)
    return source


def _statement(node: ast.stmt | ast.ExceptHandler, source: Source, extent: dict[int, Span]) -> None:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    last, body = node.end_lineno or node.lineno, getattr(node, "body", None)
    if isinstance(node, ast.Match):
        body = [node.cases[0].pattern]
    head = max(first, body[0].lineno - 1) if body else last
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        source.function_at[first] = (first, last)
        if ast.get_docstring(node, clean=False) is not None:
            source.folded.update(range(body[0].lineno + 1, body[0].end_lineno + 1))
    for line in range(first, head + 1):
        source.statement_at[line] = (first, head)
    for line in range(first, last + 1):
        extent[line] = (first, last)


def _comments(lines: list[str]) -> Iterable[tuple[int, int, list[tuple[str, str]], bool]]:
    """Line, column, (directive, its words) and whether the line holds nothing else."""
    for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
        if token.type == tokenize.COMMENT and (parts := DIRECTIVE.split(token.string))[1:]:
            yield (
                token.start[0],
                token.start[1] + (0 if not parts[0].strip("# ") else len(parts[0])),
                list(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True)),
                not token.line[: token.start[1]].strip(),
            )


def _directive(
    source: Source,
    extent: dict[int, Span],
    number: int,
    column: int,
    directives: list[tuple[str, str]],
    alone: bool,
) -> None:
    if alone:
        source.hidden.add(number)
        above = [line for line in source.statement_at if line < number and line in extent]
        line = max(above, default=number)
    else:
        source.comments[number] = column
        line = number
    at = source.statement(line)[0]
    for kind, words in directives:
        if kind == "inspect":
            source.inspect.setdefault(at, []).extend(map(Inspect.of, _split(words)))
        elif kind == "clear":
            source.clear.setdefault(at, []).extend(_split(words))
        elif kind == "stepover":
            source.stepover.add(at)
        else:
            first, last = (number, number) if alone else extent.get(line, (line, line))
            source.hidden.update(range(first, last + 1))


def _split(words: str) -> list[str]:
    """`a, f(b, c)  # as promised` -> `a` and `f(b, c)`."""
    words = words.split("#")[0].strip()
    try:
        items = ast.parse(f"({words},)", mode="eval").body.elts
        return [ast.get_source_segment(f"({words},)", item) for item in items]
    except SyntaxError:
        return [word for word in map(str.strip, words.split(",")) if word]
