"""The project keeps its own promises: size, imports, what the README says of flags and metrics."""
import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from periodic_async import Config, flag

ROOT = Path(__file__).parent.parent
# Lines at most: of the method, above the border, and of the file.
LINES = {"grpo.py": (160, 455), "attention.py": (330, 386), "model.py": (390, 770),
         "periodic_async.py": (485, 1550)}
BORDER = "# ---- The method ends here"
OURS = {"grpo": set(), "attention": set(), "model": {"attention"},
        "periodic_async": {"attention", "grpo", "model"}}


def source(name):
    return (ROOT / name).read_text()


def test_size():
    """The method first, then a border, then what makes it a program; no function above 60 lines, no
    line above 100 columns."""
    assert sorted(p.name for p in ROOT.glob("*.py")) == sorted(LINES)
    methods = 0
    for name, (method, most) in LINES.items():
        lines = source(name).splitlines()
        border, = (number for number, line in enumerate(lines) if line.startswith(BORDER))
        assert border <= method and len(lines) <= most, f"{name}: {border}, {len(lines)}"
        methods += border
        for node in ast.walk(ast.parse(source(name))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 60, f"{name}: {node.name}"
    assert methods <= 1350
    assert sum(len(source(name).splitlines()) for name in LINES) <= 3150
    for path in [*ROOT.glob("*.py"), *ROOT.glob("tests/**/*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, f"{path.name}:{number}"


def test_names_above_the_borders_are_defined_once():
    """Two things of one name in the method are two things that a reader takes for one."""
    found = []
    for name in LINES:
        above = source(name).split(BORDER)[0]
        found += [node.name for node in ast.parse(above).body
                  if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("name", OURS)
def test_imports(name):
    """Who may import what: the mathematics knows no devices, only one file knows asyncio."""
    names = set()
    for node in ast.walk(ast.parse(source(f"{name}.py"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert names & OURS.keys() == OURS[name]
    assert ("asyncio" in names) == ("argparse" in names) == (name == "periodic_async")
    assert "transformers" not in names or name in ("attention", "model")
    assert name == "periodic_async" or "print(" not in source(f"{name}.py")


def test_results_explain_every_metric():
    """A metric that tests/RESULTS.md does not explain is one that nobody can use."""
    explained = source("tests/RESULTS.md")
    part = source("grpo.py").split("def group_metrics")[1].split("\n# ----")[0]
    produced = set(re.findall(r'"([a-z_]+)":', part))
    for start, stop in (("def period_metrics", "# ---- Flags"),
                        ('return {"seconds"', "def blocks"),
                        ('result = {"schedule"', "weights.hexdigest()")):
        part = source("periodic_async.py").split(start)[1].split(stop)[0]
        produced |= set(re.findall(r'"([a-z0-9_]+)":', start + part))
    assert len(produced) > 25
    for name in produced:
        assert f"`{name}`" in explained, name


@pytest.mark.parametrize("name", ["README.md", "tests/RESULTS.md", "tests/exercises.md"])
def test_what_is_written_exists(name):
    """Flags, links to files, and programs of tests/ that a text names."""
    text = source(name)
    ours = {flag(field.name) for field in dataclasses.fields(Config)}
    others = set(re.findall(r"--[a-z][a-z-]+", source("tests/vllm_rollouts.py"))) | {
        "--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--help", "--no-lending"}
    for program in (ROOT / "tests").glob("**/*.py"):
        others |= set(re.findall(r"--[a-z][a-z-]+", program.read_text()))
    for found in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
        assert found in ours | others, found
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (ROOT / name).parent.joinpath(link).exists(), link
    for program in re.findall(r"tests/(?:bench/)?\w+\.(?:py|md)", text):
        assert (ROOT / program).exists(), program


def test_readme_is_of_its_size():
    """150 to 190 lines: what a newcomer reads in one go."""
    assert 150 <= len(source("README.md").splitlines()) <= 190


def test_readme_path():
    """The reading path: each step's lines are those of what it names."""
    steps = re.findall(r"`(\w+\.py):(\d+)-(\d+)` `([\w.]+)`", source("README.md"))
    assert len(steps) == 9
    for file, first, last, name in steps:
        node = next(n for n in ast.walk(ast.parse(source(file))) if getattr(n, "name", 0) == name)
        assert (node.lineno, node.end_lineno) == (int(first), int(last)), (
            f"{name}: {file}:{node.lineno}-{node.end_lineno}")


def test_the_tests_readme_names_every_file():
    """A file of tests/ and tests/bench that its table leaves out, or one that is gone."""
    tests = ROOT / "tests"
    there = {str(path.relative_to(tests)) for path in tests.glob("**/*")
             if path.suffix in (".py", ".md") and path != tests / "README.md"}
    named = re.findall(r"`((?:bench/)?\w+\.(?:py|md))`", source("tests/README.md"))
    assert sorted(named) == sorted(there)


def test_flags():
    """At most 40, each with its help text."""
    assert len(dataclasses.fields(Config)) <= 40
    assert all(field.metadata["help"] for field in dataclasses.fields(Config))


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    "bench_rollout.py MODEL --rows 8 --prompts 2",
    "bench_overlap.py MODEL --data DATA --groups 2 --new-tokens 8",
    "bench_trainer.py MODEL --repeats 1 --shapes 8,2,4 --vocabularies 100",
    "bench_end_to_end.py MODEL DATA --prompts 1 --samples 2 --new-tokens 4 --steps 2",
    "ablations.py --periods 1 --seeds 0 --only schedule",
    "bench_host.py MODEL --repeats 1", "bench_host.py --repeats 2",
    "bench_schedule.py MODEL --prompts 8 --samples 4", "bench_schedule.py --micro-batches",
    "bench_soak.py --periods 52 --every 30 --in-a-row 52"])
def test_benchmarks_run(random_folder, tmp_path, command):
    """One that calls what is gone: each ends with a JSON object, on a model of random weights."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1=", "answer": "2"}\n' * 8)
    words = [{"MODEL": str(random_folder), "DATA": str(data)}.get(w, w) for w in command.split()]
    done = subprocess.run([sys.executable, ROOT / "tests/bench" / words[0], *words[1:]],
                          timeout=120, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout.splitlines()[-1]), dict)
