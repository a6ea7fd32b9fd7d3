import os
import time
from pathlib import Path

import pytest

from inlay.errors import ParameterError, PMLError
from inlay.pml import Prompt, Schema, Text
from inlay.pml import nodes as limits
from tests.raising import raises
from tests.unit.pml.helpers import sentences


def schema_file(folder: Path, src: str) -> Path:
    path = folder / "s.xml"
    path.write_text(f'<schema name="s">\n  <module name="m" src="{src}"/>\n</schema>', encoding="utf-8")
    return path


def text_of(path: Path) -> str:
    (text,) = Schema.from_file(path).modules["m"].children
    assert isinstance(text, Text)
    return text.text


def src_problem(folder: Path, src: str) -> str:
    """The sentence, without its place, which is that of the attribute."""
    path = schema_file(folder, src)
    (sentence,) = sentences(lambda: Schema.from_file(path))
    place = f"{path}:2:20: "
    assert sentence.startswith(place)
    return sentence.removeprefix(place)


def test_file_text_is_verbatim_except_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    (tmp_path / "unit.py").write_bytes("\ufeff\r\n  if a < b & c:\r\n\té = '😀'\r\n\n".encode())
    assert text_of(schema_file(tmp_path, "unit.py")) == "\n  if a < b & c:\n\té = '😀'\n\n"


def test_file_in_a_subfolder_is_read_and_located(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.txt").write_text("a")
    path = schema_file(tmp_path, "lib/a.txt")
    (text,) = Schema.from_file(path).modules["m"].children
    assert str(text.place) == f"{tmp_path / 'lib' / 'a.txt'}:1:1"
    assert text_of(schema_file(tmp_path, "lib/../lib/a.txt")) == "a"


def test_an_empty_file_is_an_empty_module(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert Schema.from_file(schema_file(tmp_path, "a")).modules["m"].children == ()


def test_a_schema_in_a_string_with_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    schema = Schema.from_string('<schema name="s"><module name="m" src="a"/></schema>', folder=tmp_path)
    assert [text.text for text in schema.modules["m"].children] == ["a"]


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "a").write_text("a")
    schema_file(real, "a")
    (tmp_path / "link").symlink_to(real)
    assert text_of(tmp_path / "link" / "s.xml") == "a"


def test_a_link_inside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").symlink_to("a")
    assert text_of(schema_file(tmp_path, "b")) == "a"


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "inner"
    folder.mkdir()
    return folder


def test_src_outside_the_folder_is_rejected(inner: Path) -> None:
    assert src_problem(inner, "../secret") == (
        'src="../secret" leaves the schema\'s folder; move the file beside the schema'
    )


def test_src_outside_through_a_link_is_rejected(inner: Path) -> None:
    (inner / "file").symlink_to(inner.parent / "secret")
    (inner / "folder").symlink_to(inner.parent)
    for src in ("file", "folder/secret"):
        assert src_problem(inner, src) == f'src="{src}" leaves the schema\'s folder; move the file beside the schema'


def test_folder_with_a_longer_name_is_outside(inner: Path) -> None:
    other = inner.parent / "inner2"
    other.mkdir()
    (other / "a").write_text("a")
    assert "leaves the schema's folder" in src_problem(inner, "../inner2/a")


@pytest.mark.parametrize("src", ["/etc/passwd", "C:/a.txt", "C:\\a.txt", "\\\\host\\a"])
def test_src_is_absolute(tmp_path: Path, src: str) -> None:
    assert src_problem(tmp_path, src) == f'src="{src}" is an absolute path; write it relative to the schema\'s folder'


def test_src_is_empty(tmp_path: Path) -> None:
    assert src_problem(tmp_path, "") == 'src is empty; write src="…" with the name of a file beside the schema'


def test_src_is_missing(tmp_path: Path) -> None:
    assert src_problem(tmp_path, "a.py") == 'src="a.py": no such file; check the path'


def test_src_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    assert src_problem(tmp_path, "lib") == 'src="lib": is a folder; name a file in it'
    assert src_problem(tmp_path, ".") == 'src=".": is a folder; name a file in it'


def test_src_is_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert src_problem(tmp_path, "a/b") == 'src="a/b": cannot be read (Not a directory); check the path'


def test_src_is_a_loop_or_has_an_impossible_name(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    assert src_problem(tmp_path, "a").endswith("; check the path")
    assert src_problem(tmp_path, "a" * 5000).endswith('…": cannot be read (File name too long); check the path')


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").touch()
    path = schema_file(tmp_path, "a")
    opened = os.open

    def refuse(name: str, flags: int) -> int:
        if str(name).endswith("/a"):
            raise PermissionError(13, "Permission denied")
        return opened(name, flags)

    monkeypatch.setattr(os, "open", refuse)
    assert sentences(lambda: Schema.from_file(path)) == [
        f'{path}:2:20: src="a": permission denied; make the file readable'
    ]


def test_a_pipe_or_a_device_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    started = time.monotonic()
    remedy = "is not a regular file; name a file on disk, or read it yourself and use from_string"
    assert src_problem(tmp_path, "pipe") == f'src="pipe": {remedy}'
    assert sentences(lambda: Schema.from_file(tmp_path / "pipe")) == [f"{tmp_path / 'pipe'}: {remedy}"]
    assert sentences(lambda: Schema.from_file("/dev/zero")) == [f"/dev/zero: {remedy}"]
    assert sentences(lambda: Prompt.from_file("/dev/zero")) == [f"/dev/zero: {remedy}"]
    assert time.monotonic() - started < 5


def test_src_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"caf\xe9")
    assert src_problem(tmp_path, "a") == 'src="a": is not UTF-8; save it as UTF-8'
    (tmp_path / "a").write_bytes("café".encode("utf-16"))
    assert src_problem(tmp_path, "a") == 'src="a": is UTF-16; save it as UTF-8'
    (tmp_path / "a").write_bytes(b"a\0b")
    assert src_problem(tmp_path, "a") == 'src="a": holds NUL characters; name a file of text, saved as UTF-8'


def test_src_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(limits.MAX_BYTES + 1)
    assert src_problem(tmp_path, "a") == 'src="a": is larger than the 16777216 bytes that are allowed; split it'
    (tmp_path / "b").write_text("b" * 600)
    monkeypatch.setattr(limits, "MAX_SOURCE_BYTES", 1000)
    text = '<schema name="s"><module name="m" src="b"/>\n<module name="n" src="b"/></schema>'
    assert sentences(lambda: Schema.from_string(text, source="s.xml", folder=tmp_path)) == [
        's.xml:2:18: src="b": is larger than the 400 bytes that are allowed; split it'
    ]


FILES = {
    b"<schema name='s'>\n\xc3\xa9\xff</schema>": "2:2: is not UTF-8; save it as UTF-8",
    "<schema name='s'/>".encode("utf-16"): "1:1: is UTF-16; save it as UTF-8",
    "<schema name='s'/>".encode("utf-16-le"): (
        "1:2: a NUL character is not text; leave it out, or save the file as UTF-8"
    ),
    b"<?xml version='1.0' encoding='latin-1'?><schema name='s'/>": (
        '1:1: the file declares the encoding latin-1, but PML is UTF-8; save it as UTF-8 and write encoding="UTF-8"'
    ),
    b"": '1:1: there is nothing here; write <schema name="…"> or <prompt schema="…">',
}


@pytest.mark.parametrize(("data", "expected"), FILES.items())
@pytest.mark.parametrize("kind", [Schema, Prompt])
def test_files_without_utf8_are_rejected(
    tmp_path: Path, kind: type[Schema] | type[Prompt], data: bytes, expected: str
) -> None:
    path = tmp_path / "x.xml"
    path.write_bytes(data)
    assert sentences(lambda: kind.from_file(path)) == [f"{path}:{expected}"]


def test_files_in_utf8_with_and_without_a_declaration(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    for start in (b"\xef\xbb\xbf", b"<?xml version='1.0' encoding='utf-8'?>\n", b"<?xml version='1.0'?>"):
        path.write_bytes(start + "<schema name='é'/>".encode())
        assert Schema.from_file(str(path)).name == "é"
    path.write_text('<prompt schema="s"/>')
    assert Prompt.from_file(path) == Prompt("s", (), str(path))


def test_a_missing_file() -> None:
    for kind in (Schema, Prompt):
        assert sentences(lambda kind=kind: kind.from_file("trip.xml")) == ["trip.xml: no such file; check the path"]


def test_an_impossible_path() -> None:
    for path in ("a\0b", "\ud800", "x" * 5000):
        with raises("pml.unreadable_file", PMLError):
            Schema.from_file(path)


def test_too_large_file_is_rejected(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(limits.MAX_BYTES + 1)
    large = "is larger than the 16777216 bytes that are allowed; split it"
    assert sentences(lambda: Prompt.from_file(tmp_path / "a")) == [f"{tmp_path / 'a'}: {large}"]
    assert sentences(lambda: Prompt.from_string("é" * (limits.MAX_BYTES // 2 + 1))) == [f"<prompt>: {large}"]


@pytest.mark.parametrize("text", [b"<schema name='s'/>", None, 3])
def test_from_string_takes_a_str(text: object) -> None:
    kind = type(text).__name__
    with pytest.raises(ParameterError) as error:
        Schema.from_string(text)  # type: ignore[arg-type]
    assert str(error.value) == f"from_string takes a str, not {kind}; decode it, or give a path to from_file"
