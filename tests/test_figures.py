"""The pictures are what the stored numbers say, and the folder of any run gives two of them."""
import json
import xml.etree.ElementTree as ElementTree

import make_figures
import pytest

from model import TINY
from periodic_async import Config, train

NAMES = ["learning.svg", "packed_row.svg", "schedules.svg", "shared_prompt.svg"]


def words(path):
    return " ".join(e.text for e in ElementTree.parse(path).iter() if e.text)


def test_pictures_are_made_from_the_stored_results(tmp_path):
    """A picture that nobody made again after its numbers, its script or the mask changed."""
    make_figures.draw_all(make_figures.RESULTS, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    assert sorted(path.name for path in make_figures.RESULTS.glob("*.svg")) == NAMES
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (make_figures.RESULTS / name).read_bytes(), name
        text = words(tmp_path / name)
        assert "prefers-color-scheme:dark" in text and "ommand: " in text


def test_the_bound_is_the_benchmark_s():
    """The line of FLOPs runs through the ratios that bench_trainer printed: 1.58, 2.85, 3.90."""
    stored = json.loads((make_figures.RESULTS / "shared_prompt.json").read_text())
    for prompt, tokens, flops in ((64, 1.78, 1.58), (256, 3.33, 2.85), (512, 4.50, 3.90)):
        assert make_figures.ratios(stored, prompt) == pytest.approx((tokens, flops), abs=0.006)


def test_a_run_folder(random_folder, tmp_path):
    """Both pictures of a run of two periods, one evaluated: the last period's spans alone, from its
    start, to its copy; the curve of two rewards and three evaluations."""
    data = tmp_path / "sums.jsonl"
    data.write_text('{"question": "1+1=", "answer": "2"}\n' * 4)
    run = train(Config(**TINY | {
        "model": str(random_folder), "periods": 2, "prompts": 2, "samples": 2, "save_every": 0,
        "eval_data": str(data), "eval_every": 1, "out": str(tmp_path / "run")}))
    make_figures.draw_run(tmp_path / "run")
    metrics = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    spans = make_figures.last_period(tmp_path / "run")
    assert [name for _, name, *_ in spans].count("step") == 1 and spans[-1][1] == "copy"
    assert min(start for *_, start, _ in spans) == 0
    assert spans[-1][3] <= metrics[1]["seconds"]
    read = make_figures.read_run(tmp_path / "run")
    assert read["reward"] == [m["reward"] for m in metrics]
    assert read["evals"] == [[0, run["eval_first"]], [1, metrics[0]["eval_reward"]],
                             [2, run["eval_last"]]]
    assert "generate busy" in words(tmp_path / "run" / "schedule.svg")
    assert "in the last of 2" in words(tmp_path / "run" / "learning.svg")


def test_what_is_joined_is_what_no_eye_sees():
    """Spans of one name close to each other become one, and none is lost."""
    spans = [["train", "train", 5, 6], ["train", "train", 6.1, 8], ["generate", "decode", 0, 1],
             ["generate", "decode", 1.1, 2], ["generate", "prefill", 2.1, 3],
             ["generate", "decode", 4, 5], ["generate", "decode", 5.5, 6]]
    assert list(make_figures.joined(spans, 0.2, 1.5)) == [
        ["generate", "decode", 0, 2], ["generate", "prefill", 2.1, 3], ["generate", "decode", 4, 5],
        ["generate", "decode", 5.5, 6], ["train", "train", 5, 6], ["train", "train", 6.1, 8]]


@pytest.mark.parametrize("highest,found", [
    (1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (7, [0, 1, 2, 3, 4, 5, 6, 7]), (41, [0, 10, 20, 30, 40, 50]),
    (0.3, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])])
def test_ticks(highest, found):
    assert make_figures.ticks(highest) == pytest.approx(found)


def test_runs_of_other_bits_are_not_called_equal(tmp_path):
    """The claim of a picture comes from its hashes."""
    for name, draw, key in (("learning", make_figures.draw_learning, "equal to the last bit"),
                            ("schedules", make_figures.draw_schedules, "same weights")):
        stored = json.loads((make_figures.RESULTS / f"{name}.json").read_text())
        runs = stored["runs"] if name == "learning" else list(stored["runs"].values())
        for run in runs:
            run |= {"rollouts_sha256": "same", "weights_sha256": "same"}
        draw(stored, tmp_path / "equal.svg")
        runs[-1]["weights_sha256"] = "other"
        draw(stored, tmp_path / "other.svg")
        title = lambda path: " ".join(e.text for e in ElementTree.parse(path).iter()
                                      if "title" in e.get("class", ""))
        if name == "schedules" or len({r["schedule"] for r in runs}) == 2:
            assert key in title(tmp_path / "equal.svg")
        assert key not in title(tmp_path / "other.svg")
