"""Text: which files are read, what one document is, and the text that Python itself carries.

Decides what counts as readable text and refuses the rest with file and line. Knows nothing of
tokens. All documents are held in memory.
"""

import ast
import glob
import gzip
import json
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

from switchjax.errors import UserError

_KINDS = (".txt", ".jsonl")

# Not documentation: other people's packages, and tests (some of them broken on purpose).
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SHORTEST_DOCSTRING = 32  # characters; below are things like "Return self."


def documents_of(files: tuple[str, ...], json_field: str) -> list[str]:
    """The text of these globs, or without any the text that Python carries."""
    return read_documents(files, json_field) if files else builtin_documents()


def read_documents(files: tuple[str, ...], json_field: str) -> list[str]:
    """Documents of all files that the globs match, by file path, then by line.

    A .txt file is one document, a .jsonl file has one a line in field `json_field`; either may
    be compressed (.txt.gz, .jsonl.gz). `**` crosses directories, `~` is the home directory, and
    a file that two globs match is read once.

    Raises:
        UserError: a glob matches no file, or a file is empty, unreadable, damaged, of another
            kind, not UTF-8, or has a line without such a field.
    """
    paths = sorted({path for pattern in files for path in _matches(pattern)})
    return [text for path in paths for text in _documents_of(path, json_field)]


def _matches(pattern: str) -> list[str]:
    expanded = os.path.expanduser(pattern)
    if os.path.isfile(expanded):  # a name that holds [ or ? is no pattern
        return [expanded]
    # Directories match `**`; a dangling link stays in, so that reading it says what is wrong.
    found = [p for p in glob.glob(expanded, recursive=True) if not os.path.isdir(p)]
    if not found:
        raise UserError(f"data.files: no file matches {pattern!r}")
    return found


def _documents_of(path: str, json_field: str) -> list[str]:
    name = path.lower().removesuffix(".gz")
    kind = Path(name).suffix
    if kind not in _KINDS:
        raise UserError(f"data.files: {path}: expected .txt, .jsonl, .txt.gz or .jsonl.gz")
    text = _read_text(path)
    if kind == ".txt":
        return [text]
    return list(_json_lines(path, text, json_field))


def _read_text(path: str) -> str:
    try:
        raw = Path(path).read_bytes()
        if path.lower().endswith(".gz"):
            raw = gzip.decompress(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"data.files: {path}: damaged gzip file: {error}") from None
    except OSError as error:
        raise UserError(f"data.files: {path}: cannot be read: {error.strerror}") from None
    if not raw.strip():
        raise UserError(f"data.files: {path}: the file is empty")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = raw[error.start]
        raise UserError(f"data.files: {path}:{line}: not UTF-8 (byte 0x{byte:02x})") from None


def _json_lines(path: str, text: str, json_field: str) -> Iterator[str]:
    # Not splitlines(): JSON strings may hold U+2028 and other separators as they are.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        where = f"data.files: {path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected a JSON object, got {type(value).__name__}")
        if json_field not in value:
            fields = ", ".join(repr(key) for key in value) or "none"
            raise UserError(f"{where}: no field {json_field!r}; its fields: {fields}")
        document = value[json_field]
        if not isinstance(document, str):
            raise UserError(
                f"{where}: field {json_field!r} must be a string, got {type(document).__name__}"
            )
        if any("\ud800" <= character <= "\udfff" for character in set(document)):
            raise UserError(f"{where}: field {json_field!r} holds half a surrogate pair")
        yield document


def builtin_documents() -> list[str]:
    """Documentation that every Python installation carries, about 2 MB; always in one order.

    The language reference's topics (`pydoc_data.topics`), then each distinct docstring of the
    standard library's sources. The text differs between Python versions, so losses on it are
    comparable on one version only.

    Raises:
        UserError: this Python was installed without documentation and sources.
    """
    documents = _topics()
    for path in _library_sources():
        documents += _docstrings(path)
    documents = list(dict.fromkeys(documents))  # keeps the first of equal ones
    if not documents:
        raise UserError("data.files: this Python carries no documentation; name your own files")
    return documents


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some Linux packages of Python split it off
        return []
    return [topics[name] for name in sorted(topics)]


def _library_sources() -> Iterator[str]:
    for directory, names, files in os.walk(sysconfig.get_path("stdlib")):
        names[:] = sorted(set(names) - _SKIPPED_DIRECTORIES)
        yield from (os.path.join(directory, f) for f in sorted(files) if f.endswith(".py"))


def _docstrings(path: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in sources that are not ours
        module = ast.parse(Path(path).read_bytes())
    found = (ast.get_docstring(node) for node in (module, *_definitions(module.body)))
    return [text for text in found if text and len(text) >= _SHORTEST_DOCSTRING]


_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(body: list[ast.stmt]) -> Iterator[_Definition]:
    """Classes and functions in order; walking all of the tree would take twice as long."""
    for node in body:
        if isinstance(node, _Definition):
            yield node
            yield from _definitions(node.body)
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body)
            yield from _definitions(node.orelse)
