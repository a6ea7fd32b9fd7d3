"""Stored answers are found again, never mixed with another run's, and survive an interrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

from inlay import ParameterError
from inlay_lab.eval.answers import AnswerLog, case_keys
from inlay_lab.eval.modular_cases import draw_rounds

OF = {"model": "small"}
MODE = {"reuse": "off", "positions": "packed"}
OTHER = {"reuse": "anchored", "positions": "packed"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "answers.jsonl"


def keep(path: Path, said: str, keys: tuple[str, ...] = ("a", "b")) -> None:
    with AnswerLog(path, OF) as log:
        log.add(MODE, keys, [{"said": f"{said} {key}"} for key in keys])


def test_answers_are_found_by_mode_and_case(path: Path):
    keep(path, "one")
    keep(path, "two", ("c",))
    with AnswerLog(path, OF) as log:
        assert log.find(MODE, ["c", "a"]) == [{"said": "two c"}, {"said": "one a"}]
        assert log.find(dict(reversed(MODE.items())), ["b"]) == [{"said": "one b"}]
        assert log.find(MODE, ["a", "d"]) is None
        assert log.find(OTHER, ["a"]) is None


def test_log_without_a_file_stores_nothing():
    with AnswerLog(None, OF) as log:
        log.add(MODE, ["a"], [{"said": "one a"}])
        assert log.find(MODE, ["a"]) is None


def test_truncated_line_is_dropped(path: Path):
    keep(path, "one")
    whole = path.read_bytes()
    for cut in (1, 5, 30):
        path.write_bytes(whole[:-cut])
        keep(path, "again", ("b",))
        with AnswerLog(path, OF) as log:
            assert log.find(MODE, ["a", "b"]) == [{"said": "one a"}, {"said": "again b"}]
    path.write_bytes(whole[:8])  # of the first line
    keep(path, "anew")
    assert path.read_bytes() == whole.replace(b"one", b"anew")


def test_answers_of_another_model_are_rejected(path: Path):
    keep(path, "one")
    kept = path.read_bytes()
    with pytest.raises(ParameterError, match=r'answers\.jsonl is of {"model": "small"}, not of {"model": "large"}'):
        AnswerLog(path, {"model": "large"})
    assert path.read_bytes() == kept


@pytest.mark.parametrize("line", ["{", "[]", '{"mode": {}}', '{"case": "a"}', "3"])
def test_damaged_line_is_located(path: Path, line: str):
    keep(path, "one")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ParameterError, match=r"answers\.jsonl:4 is damaged; delete the file to ask anew"):
        AnswerLog(path, OF)


def test_unwritable_file_is_rejected(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ParameterError, match=r"file/answers\.jsonl: cannot be written"):
        AnswerLog(tmp_path / "file" / "answers.jsonl", OF)


def test_case_key_covers_all_settings():
    def keys(**changed: int) -> list[str]:
        drawn = {"documents": 3, "spare": 1, "questions": 20, "seed": 0} | changed
        return [key for each in draw_rounds(**drawn) for key in case_keys(each)]

    assert len(set(keys())) == 20
    assert keys() == keys()
    for changed in ({"seed": 1}, {"spare": 2}, {"documents": 4}):
        assert not set(keys()) & set(keys(**changed))
