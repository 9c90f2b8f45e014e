"""What is read as text, and what is refused with file and line."""

import gzip
import json

import pytest

from switchjax.data.corpus import builtin_documents, read_documents
from switchjax.errors import UserError


def _write(path, content):
    raw = content if isinstance(content, bytes) else content.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def test_files_in_order_of_path_then_line(tmp_path):
    _write(tmp_path / "b.txt", "two\nlines")
    _write(tmp_path / "a" / "x.jsonl", '{"text": "1"}\n{"text": "2\u20283", "more": 0}\n')
    _write(tmp_path / "c.jsonl.gz", '{"text": ""}\r\n{"text": "4"}')
    _write(tmp_path / "d.TXT.gz", "five")
    everything = (f"{tmp_path}/**/*", f"{tmp_path}/b.txt")  # b.txt is read once all the same
    assert read_documents(everything, "text") == ["1", "2\u20283", "two\nlines", "", "4", "five"]


def test_home_directory_and_names_that_look_like_patterns(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(tmp_path / "notes[1].txt", "text")
    assert read_documents(("~/notes[1].txt",), "text") == ["text"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "", "a.txt: the file is empty"),
        ("a.txt", " \n", "a.txt: the file is empty"),
        ("a.jsonl.gz", "", "a.jsonl.gz: the file is empty"),
        ("a.txt", b"good\nb\xffd\n", "a.txt:2: not UTF-8 (byte 0xff)"),
        ("a.jsonl", '{"text": "1"}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", '{"text": "1"}\n\n{"text": "2"}', "a.jsonl:2: not JSON"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: not JSON"),
        ("a.jsonl", '["text"]', "a.jsonl:1: expected a JSON object, got list"),
        ("a.jsonl", '{"txt": "1", "id": 3}', "a.jsonl:1: no field 'text'; its fields: 'txt', 'id'"),
        ("a.jsonl", '{"text": 3}', "a.jsonl:1: field 'text' must be a string, got int"),
        ("a.jsonl", '{"text": "\\ud800"}', "a.jsonl:1: field 'text' holds half a surrogate pair"),
        ("a.md", "text", "a.md: expected .txt, .jsonl, .txt.gz or .jsonl.gz"),
        ("a.gz", "text", "a.gz: expected .txt, .jsonl, .txt.gz or .jsonl.gz"),
    ],
)
def test_bad_file(tmp_path, name, content, message):
    path = _write(tmp_path / name, content)
    with pytest.raises(UserError) as caught:
        read_documents((path,), "text")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_gzip(tmp_path):
    whole = gzip.compress(json.dumps({"text": "x" * 1000}).encode())
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for raw in (b"not gzip", whole[:-9], bytes(damaged)):
        (tmp_path / "a.jsonl.gz").write_bytes(raw)
        with pytest.raises(UserError, match="a.jsonl.gz: damaged gzip file"):
            read_documents((f"{tmp_path}/*.gz",), "text")


def test_no_match_and_unreadable(tmp_path):
    for pattern in (f"{tmp_path}/*.txt", f"{tmp_path}/missing.txt", str(tmp_path)):
        with pytest.raises(UserError, match="no file matches"):
            read_documents((pattern,), "text")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="dangling.txt: cannot be read: No such file"):
        read_documents((f"{tmp_path}/*.txt",), "text")


def test_builtin_documents():
    documents = builtin_documents()
    assert 1e6 < sum(map(len, documents)) < 6e6
    assert len(set(documents)) == len(documents)
    assert documents == builtin_documents()
    assert any("Return the absolute value of the argument" in d or "yield" in d for d in documents)
