"""Two languages that Pygments does not know: MLIR, as Triton prints it, and NVIDIA's SASS."""

from __future__ import annotations

from typing import Any, ClassVar

from pygments.lexer import RegexLexer, default
from pygments.token import Comment, Keyword, Name, Number, String, Text


class MlirLexer(RegexLexer):
    """Operations are keywords, layouts and attributes strings."""

    name = "MLIR"
    tokens: ClassVar[dict[str, Any]] = {
        "root": [
            (r"//.*", Comment),
            (r'"[^"]*"', String),
            (r"[#!][\w.]+", String),
            (r"%[\w$.-]+(?:[:#]\d+)?", Name),
            (r"\b(?:tensor|memref|f16|bf16|f32|f64|i\d+|index|dense|true|false|loc)\b", Text),
            (r"\b[a-z]\w*\.[\w.]+", Keyword),
            (r"-?\b\d[\w.+-]*", Number),
            (r"\w+", Text),
            (r".", Text),
        ]
    }


class SassLexer(RegexLexer):
    """The opcode is a keyword, behind a predicate if there is one."""

    name = "SASS"
    tokens: ClassVar[dict[str, Any]] = {
        "root": [
            (r"….*|//.*", Comment),
            (r"^\.L\w+:", String),
            (r"^(\s+)(@!?U?P\w+\s+)?", Text, "opcode"),
            (r"`\([^)]*\)", String),
            (r"-?\b0x[0-9a-f]+\b|-?\b\d[\w.+-]*", Number),
            (r"\w+", Text),
            (r".", Text),
        ],
        "opcode": [(r"[A-Z][\w.]*", Keyword, "#pop"), default("#pop")],
    }
