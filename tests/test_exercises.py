"""tests/exercises.md: ten exercises, each with one folded answer, and every name in it is there."""
import ast
import dataclasses
import re
from pathlib import Path

import pytest

from grpo import LOSSES
from periodic_async import Config, flag

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "tests/exercises.md").read_text()
PARTS = re.split(r"^## ", TEXT, flags=re.M)[1:]
SOURCES = [path for path in (*ROOT.glob("*.py"), *ROOT.glob("tests/*.py"))
           if path.name != "test_exercises.py"]


def test_ten_exercises_with_one_answer_each():
    """An answer outside its fold, or a fold without its end, would be read before the question."""
    assert [part.split(".")[0] for part in PARTS] == [str(n) for n in range(1, 11)]
    for part in PARTS:
        question, answer = part.split("<details><summary>What happened</summary>\n")
        assert answer.rstrip().endswith("</details>") and answer.count("</details>") == 1
        assert 2 <= len(question.strip().splitlines()) - 2 <= 5, question.splitlines()[0]
        assert answer.count("```diff\n") >= 1 and answer.count("```") % 2 == 0
    assert TEXT.count("<details>") == 10


def defined():
    """Every name in the sources and tests, and every string without a space: metrics, files."""
    names = set(LOSSES)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names |= {getattr(node, field) for field in ("name", "id", "attr", "arg", "module")
                      if isinstance(getattr(node, field, None), str)}
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names |= set() if " " in node.value else {node.value}
    return names


def in_backticks():
    """What stands in backticks in the text, outside its fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S)
    return sorted(set(re.findall(r"`([^`]+)`", prose)))


@pytest.fixture(scope="module")
def names():
    return defined()


@pytest.mark.parametrize("word", in_backticks())
def test_what_is_named_exists(names, word):
    """A command's flags, a file, a test, a function, a method of a class: what is renamed in the
    sources must be renamed here, too."""
    if "--" in word:
        known = {flag(field.name) for field in dataclasses.fields(Config)}
        assert set(re.findall(r"--[a-z-]+", word)) <= known
    elif word.endswith(".py"):
        assert (ROOT / word).is_file()
    else:
        assert word in names or set(word.split(".")) <= names


def test_changed_lines_are_in_the_sources():
    """The lines that a diff takes out are lines of the sources, so it can be done."""
    lines = {line.strip() for path in SOURCES for line in path.read_text().splitlines()}
    taken = re.findall(r"^-(?!--)(.+)$", "\n".join(re.findall(r"```diff\n(.*?)```", TEXT, re.S)),
                       re.M)
    assert len(taken) >= 10
    for line in taken:
        assert line.strip() in lines, line
