"""Pictures as SVG, by the standard library alone, from what is stored or from the folder of a run.

    python tests/make_figures.py               # tests/results/*.json -> tests/results/*.svg
    python tests/make_figures.py runs/X        # -> runs/X/schedule.svg, runs/X/learning.svg

How the stored numbers came about (--said: the caption's machine and command; else it stays):
    python tests/make_figures.py --schedules SYNC ASYNC --said ..       # two folders of runs
    python tests/make_figures.py --collect async-0 sync-0 .. --said ..  # and what async-0.log holds
shared_prompt.json is copied from the table of a benchmark; the packed row is computed here.
"""
import argparse
import itertools
import json
import statistics
import sys
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "results"
WIDTH, LEFT, RIGHT = 760, 64, 24
# Class: colour by day, by night. Both are told apart without red and green.
COLOURS = {"paper": ("#ffffff", "#12161c"), "ink": ("#1f2328", "#e6edf3"),
           "soft": ("#59636e", "#9aa4af"), "line": ("#d1d9e0", "#3a424c"),
           "a": ("#0072b2", "#58a6ff"), "b": ("#d55e00", "#f0883e"), "c": ("#008060", "#3fb68b"),
           "d": ("#9a4f86", "#d58fc1"), "e": ("#8ec3e6", "#1f5f99"), "f": ("#f2bd92", "#8a4b14")}


def style() -> str:
    sets = ["".join(f".{name}{{fill:{pair[night]}}}.{name}-line{{fill:none;stroke:{pair[night]}}}"
                    for name, pair in COLOURS.items()) for night in (0, 1)]
    return ("<style>text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
            "text.title{font-size:17px;font-weight:600}text.small{font-size:11px}"
            f"text.code{{font:11px ui-monospace,Menlo,Consolas,monospace}}{sets[0]}"
            f"@media (prefers-color-scheme:dark){{{sets[1]}}}</style>")


class Picture:
    """Parts of an SVG: a title that is the claim, what is drawn, a caption below. `y` is where the
    next part may begin."""

    def __init__(self, claim: str):
        self.parts, self.y = [], 8
        self.lines(claim, 64, "ink title", 22)
        self.y += 10

    def text(self, x: float, y: float, words: str, kind: str = "ink", anchor: str = "start"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
                          f'{escape(words)}</text>')

    def lines(self, words: str, width: int, kind: str, height: int) -> None:
        """Text from the left edge, a new line after `width` characters, from `y` down."""
        for line in textwrap.wrap(words, width, break_on_hyphens=False):
            self.y += height
            self.text(24, self.y, line, kind)

    def box(self, x: float, y: float, width: float, height: float, kind: str, more: str = ""):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                          f'height="{height:.1f}" class="{kind}"{more}/>')

    def path(self, points, kind: str, width: float = 2, more: str = "") -> None:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{joined}" class="{kind}-line" '
                          f'stroke-width="{width}"{more}/>')

    def dot(self, x: float, y: float, kind: str, radius: float = 3.5) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}"/>')

    def key(self, entries) -> None:
        """A line of (colour, word)."""
        self.y += 20
        x = LEFT
        for kind, word in entries:
            self.box(x, self.y - 10, 18, 10, kind)
            self.text(x + 24, self.y, word, "soft")
            x += 46 + 7 * len(word)
        self.y += 8

    def axes(self, height: float, across, up=None, across_name="", up_name=""):
        """Ticks and names below the next `height` pixels, and left of them where `up` is given;
        both are lists of ticks from the lowest to the highest. Returns the place of an x, of a y,
        as two functions."""
        top, right = self.y + (22 if up_name else 4), WIDTH - RIGHT
        bottom = top + height

        def place(ticks, low, high):
            return lambda value: low + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (high - low)
        x, y = place(across, LEFT, right), place(up or [0, 1], bottom, top)
        for tick in across:
            if not up:
                self.path([(x(tick), top), (x(tick), bottom)], "line", 1)
            self.text(x(tick), bottom + 17, f"{tick:g}", "soft", "middle")
        for tick in up or ():
            self.path([(LEFT, y(tick)), (right, y(tick))], "line", 1)
            self.text(LEFT - 8, y(tick) + 4, f"{tick:g}", "soft", "end")
        self.path([(LEFT, bottom), (right, bottom)], "soft", 1)
        self.text(right, bottom + 34, across_name, "soft", "end")
        self.text(24, top - 12, up_name, "soft")
        self.y = bottom + (40 if across_name else 22)
        return x, y

    def save(self, path: Path, *captions: str) -> None:
        for caption in captions:
            self.y += 4
            self.lines(caption, 116, "soft small", 15)
        height = self.y + 18
        path.write_text("\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{WIDTH}" height="{height:.0f}" role="img">', style(),
            f'<rect width="{WIDTH}" height="{height:.0f}" rx="8" class="paper"/>',
            *self.parts, "</svg>"]) + "\n", encoding="utf-8")


def ticks(highest: float, most: int = 8) -> list[float]:
    """From 0 in round steps, at most so many, to `highest` or just above it."""
    step = next(step for power in itertools.count(-3) for step in (
        10.0**power, 2 * 10.0**power, 5 * 10.0**power) if highest / step <= most)
    count = -(-highest // step)
    return [round(step * n, 6) for n in range(int(count) + 1)]


# ---- Schedules

KINDS = {"prefill": "e", "decode": "a", "train": "b", "step": "d", "copy": "c"}


def last_period(folder: Path) -> list[list]:
    """Spans [side, name, start, end] of the last period of a run, in seconds from its start. The
    weight copy is the last span of a period."""
    text = (folder / "trace.json").read_text().rstrip().rstrip(",")
    events = json.loads(text + "]")
    ends = [number for number, event in enumerate(events) if event["name"] == "copy"]
    if not ends:
        raise ValueError(f"{folder}/trace.json holds no whole period")
    events = events[ends[-2] + 1 if len(ends) > 1 else 0:ends[-1] + 1]
    begun = min(event["ts"] for event in events)
    return [[e["tid"], e["name"], round((e["ts"] - begun) / 1e6, 4),
             round((e["ts"] + e["dur"] - begun) / 1e6, 4)] for e in events]


def joined(spans, gap: float, short: float):
    """Spans of one name that are shorter than `short`, with less than `gap` between them, as one:
    no eye tells them apart."""
    for _, own in itertools.groupby(sorted(spans, key=lambda s: (s[0], s[2])),
                                    key=lambda s: (s[0], s[1])):
        held = None
        for span in own:
            if held and span[2] - held[3] < gap and span[3] - span[2] < short:
                held = [*held[:3], span[3]]
            else:
                if held:
                    yield held
                held = span
        yield held


def draw_spans(picture: Picture, panels: dict[str, list]) -> None:
    """One panel a schedule, a row a side, all on one axis of seconds."""
    ends = {name: max(span[3] for span in spans) for name, spans in panels.items()}
    picture.key([(kind, name) for name, kind in KINDS.items()])
    row, top = 30, picture.y
    across = ticks(max(ends.values()))
    x, _ = picture.axes(len(panels) * (2 * row + 34) - 8, across, across_name="seconds")
    for number, (name, spans) in enumerate(panels.items()):
        up = top + 10 + number * (2 * row + 34)
        busy = {side: sum(e - s for who, _, s, e in spans if who == side) / ends[name]
                for side in ("generate", "train")}
        picture.text(LEFT + 2, up + 10, f"{name}: {ends[name]:.1f} s, generate busy "
                     f"{busy['generate']:.0%}, train {busy['train']:.0%}")
        for place, side in enumerate(("generate", "train")):
            y = up + 18 + place * row
            picture.text(LEFT - 6, y + 16, side, "soft small", "end")
            own = [span for span in spans if span[0] == side]
            pixel = across[-1] / (WIDTH - LEFT - RIGHT)
            for _, what, start, end in joined(own, pixel / 2, 6 * pixel):
                picture.box(x(start), y, max(x(end) - x(start) - 0.6, 0.3), row - 8,
                            KINDS.get(what, "soft"))


def draw_schedules(stored: dict, path: Path) -> None:
    runs = stored["runs"]
    seconds = {name: max(span[3] for span in run["spans"]) for name, run in runs.items()}
    equal = all(len({run[key] for run in runs.values()}) == 1
                for key in ("rollouts_sha256", "weights_sha256"))
    gain = seconds["sync"] / seconds["async"]
    picture = Picture(f"The same responses{' and the same weights' if equal else ''}, "
                      f"{gain:.2f} times as fast: training begins with the first complete group")
    draw_spans(picture, {"sync, the baseline": runs["sync"]["spans"],
                         "async": runs["async"]["spans"]})
    hashes = "; ".join(f"{name}: rollouts {run['rollouts_sha256'][:16]}, weights "
                       f"{run['weights_sha256'][:16]}" for name, run in runs.items())
    picture.save(path, f"A block of train is a micro-batch. SHA-256 of {hashes}.", stored["said"])


# ---- Learning

def read_run(folder: Path) -> dict:
    """What a run learnt: mean reward a period, (periods, accuracy) of each evaluation; its last
    line, where FOLDER.log holds what it printed."""
    metrics = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    if not metrics:
        raise ValueError(f"{folder}/metrics.jsonl is empty")
    evals = [[m["period"] + 1, m["eval_reward"]] for m in metrics if "eval_reward" in m]
    before = folder / "eval-000000.jsonl"
    if before.exists():
        rewards = [json.loads(line)["rewards"] for line in open(before)]
        scored = [r for own in rewards for r in own if r is not None]
        evals.insert(0, [0, round(statistics.fmean(scored), 6)])
    run = {"periods": len(metrics), "reward": [m["reward"] for m in metrics], "evals": evals}
    log = folder.with_name(folder.name + ".log")
    lines = log.read_text().splitlines() if log.exists() else []
    if lines and lines[-1].startswith("{"):
        result = json.loads(lines[-1])
        run |= {key: result[key] for key in ("rollouts_sha256", "weights_sha256", "seconds")}
    return run


def draw_curve(run: dict, name: str, path: Path) -> None:
    """Of one run: reward a period, and what was held out."""
    evals = run["evals"]
    claim = f"{name}: mean reward {run['reward'][0]:.3f} in the first period, "
    picture = Picture(claim + f"{run['reward'][-1]:.3f} in the last of {run['periods']}")
    values = [r for r in run["reward"] if r is not None] + [value for _, value in evals]
    picture.key([("e", "mean reward of a period's responses")]
                + ([("a", "held-out problems")] if evals else []))
    low = min([0, *values])
    x, y = picture.axes(240, ticks(max(run["periods"], 1)), [
        round(low + tick, 6) for tick in ticks(max(values) - low or 1, 6)],
        "periods", "reward")
    rewards = [(x(n + 0.5), y(r)) for n, r in enumerate(run["reward"]) if r is not None]
    picture.path(rewards, "e", 1.5)
    picture.path([(x(n), y(value)) for n, value in evals], "a", 2)
    for n, value in evals:
        picture.dot(x(n), y(value), "a")
    picture.save(path)


def draw_learning(stored: dict, path: Path) -> None:
    """Both schedules, a colour a seed: async broad, sync thin and dashed on top of it."""
    runs = {(run["schedule"], run["seed"]): run for run in stored["runs"]}
    seeds = sorted({seed for _, seed in runs})
    same, hashes = [], []
    for seed in seeds:
        both = [runs.get((schedule, seed), {}) for schedule in ("async", "sync")]
        digests = [run.get("rollouts_sha256", "")[:16] + " " + run.get("weights_sha256", "")[:16]
                   for run in both]
        ended = all(len(digest) > 1 for digest in digests)
        same.append(ended and digests[0] == digests[1])
        hashes.append(f"seed {seed}, {len(both[0].get('reward', []))} periods: " + (
            f"async {digests[0]}, sync {digests[1]}" if ended else "not ended yet"))
    claim = ("Held-out accuracy under both schedules is one curve a seed, equal to the last bit"
             if all(same) else "Held-out accuracy under both schedules (not all runs have ended)")
    picture = Picture(claim)
    colours = dict(zip(seeds, "abcd"))
    picture.key([(colours[seed], f"seed {seed}") for seed in seeds])
    picture.text(LEFT + 330, picture.y - 8, "broad and pale: async; dashed: sync", "soft")
    most = max(n for run in runs.values() for n, _ in run["evals"])
    x, y = picture.axes(240, ticks(most), [0, 0.2, 0.4, 0.6, 0.8, 1], "periods",
                        "greedy accuracy")
    for (schedule, seed), run in sorted(runs.items()):
        points = [(x(n), y(value)) for n, value in run["evals"]]
        if schedule == "async":
            picture.path(points, colours[seed], 9, ' opacity="0.35" stroke-linecap="round"')
        else:
            picture.path(points, colours[seed], 2, ' stroke-dasharray="6 4"')
            for point in points:
                picture.dot(*point, colours[seed], 3)
    last = min(run["evals"][-1][0] for run in runs.values())  # of the run with the fewest periods
    after = {n: [dict(run["evals"])[n] for (schedule, _), run in runs.items()
                 if schedule == "async"] for n in (0, last)}
    spread = [f"{statistics.fmean(found):.3f} after {n}" + (
        f" (± {statistics.stdev(found):.3f})" if len(found) > 1 else "")
        for n, found in after.items()]
    picture.save(path, f"Greedy accuracy, mean of the seeds: {', '.join(spread)} periods. Of "
                 "each run the first 16 digits of SHA-256 of all sampled tokens, of the final "
                 "weights:",
                 *hashes, stored["said"])


# ---- The shared prompt

def ratios(stored: dict, p: float) -> tuple[float, float]:
    """Tokens and FLOPs with a copy of p prompt tokens a response, over those with one prompt."""
    k, r, flops = stored["samples"], stored["response_tokens"], stored["flops"]
    triangle = lambda n: n * (n + 1) / 2
    tokens = k * (p + r), p + k * r
    pairs = k * triangle(p + r), triangle(p) + k * (triangle(r) + r * p)
    whole = [flops["token"] * t + flops["response_token"] * k * r + flops["pair"] * n
             for t, n in zip(tokens, pairs)]
    return tokens[0] / tokens[1], whole[0] / whole[1]


def draw_shared_prompt(stored: dict, path: Path) -> None:
    """Measured speed-ups over the prompt's length, and the two ratios that bound them."""
    costs, series = (lambda p: ratios(stored, p)), stored["series"]
    best = max((point for one in series for point in one["points"]), key=lambda p: p[1])
    picture = Picture(f"The longer the prompt, the more a shared one saves: {best[1]:.2f} times at "
                      f"{best[0]} tokens; the FLOPs allow {costs(best[0])[1]:.2f}")
    picture.key([("d", "fewer FLOPs, the bound"), ("soft", "fewer tokens")]
                + [(kind, one["name"]) for kind, one in zip("abc", series)])
    longest = max(point[0] for one in series for point in one["points"])
    x, y = picture.axes(250, ticks(longest * 1.1, 6), ticks(costs(longest * 1.1)[0], 6),
                        "tokens of the prompt", "speed-up of forward and backward pass")
    lengths = [longest * 1.1 * n / 60 for n in range(61)]
    picture.path([(x(p), y(costs(p)[0])) for p in lengths], "soft", 1.5, ' stroke-dasharray="3 4"')
    picture.path([(x(p), y(costs(p)[1])) for p in lengths], "d", 2)
    for kind, one in zip("abc", series):
        for p, speedup in one["points"]:
            picture.dot(x(p), y(speedup), kind, 5)
    picture.save(path, stored["said"])


# ---- A packed row

def draw_packed_row(path: Path) -> None:
    """Two prompts with three and two responses, and their mask as `shared_prompt_mask` says it."""
    sys.path.insert(0, str(ROOT))
    from attention import pack, shared_prompt_mask
    responses = [[2, 3, 2], [2, 3]]
    packed = pack([[0] * 3, [0] * 2], [[[0] * n for n in own] for own in responses])
    mask, cost = shared_prompt_mask(packed).tolist(), packed.cost()
    size, left = 21, 150
    labels = []
    for group, (prompt, own) in enumerate(zip((3, 2), responses), 1):
        labels += [(f"p{group}", prompt), *((f"r{group}{n}", x) for n, x in enumerate(own, 1))]
    kinds = [kind for name, length in labels
             for kind in ["d" if name[0] == "p" else "ca"[int(name[-1]) % 2]] * length]
    picture = Picture("A prompt once, and all its responses, in one row: a token sees its prompt "
                      "and its own response so far, nothing else")
    top = picture.y + 34
    starts = list(itertools.accumulate((length for _, length in labels), initial=0))
    for (name, length), start in zip(labels, starts):
        middle = start + length / 2
        picture.text(left + size * middle, top - 8, name, "ink", "middle")
        picture.text(left - 8, top + 34 + size * middle + 5, name, "ink", "end")
    picture.text(24, top + 15, "the row, positions", "soft small")
    picture.text(24, top + 34 + 15, "may attend to", "soft small")
    for place, (kind, position) in enumerate(zip(kinds, packed.position_ids[0].tolist())):
        picture.box(left + size * place, top, size - 2, size - 2, kind)
        picture.text(left + size * place + size / 2 - 1, top + 14, str(position), "paper small",
                     "middle")
    top += 34
    for i, row in enumerate(mask):
        for j, seen in enumerate(row):
            picture.box(left + size * j, top + size * i, size - 2, size - 2,
                        kinds[j] if seen else "line", "" if seen else ' opacity="0.45"')
    side = left + size * len(mask) + 10
    for n, line in enumerate(("a line a query, a column a key", "purple: prompts",
                              "blue, green: responses", "grey: hidden")):
        picture.text(side, top + 14 + 17 * n, line, "soft small")
    picture.y = top + size * len(mask) + 12
    picture.save(path, f"Here {cost['tokens_shared']} tokens and {cost['pairs_shared']} pairs of "
                 "query and key; with a prompt a response, the baseline, "
                 f"{cost['tokens_repeated']} and {cost['pairs_repeated']}. Both give the same "
                 "log-probs and gradients, for a response's positions go on where its prompt "
                 "ends.", "Computed, not measured, by attention.shared_prompt_mask. Command: "
                 "python tests/make_figures.py")


# ---- The command

def draw_all(results: Path, out: Path) -> None:
    """Every picture of the stored results."""
    for name, draw in (("schedules", draw_schedules), ("learning", draw_learning),
                       ("shared_prompt", draw_shared_prompt)):
        draw(json.loads((results / f"{name}.json").read_text()), out / f"{name}.svg")
    draw_packed_row(out / "packed_row.svg")


def draw_run(folder: Path) -> None:
    """A run's last period and its learning curve, into its folder."""
    spans, run = last_period(folder), read_run(folder)
    seconds = max(span[3] for span in spans)
    picture = Picture(f"The last period of {folder.name}: {seconds:.2f} s")
    draw_spans(picture, {"period " + str(run["periods"] - 1): spans})
    picture.save(folder / "schedule.svg")
    draw_curve(run, folder.name, folder / "learning.svg")


def store(path: Path, said: str, runs) -> None:
    """JSON, a run a line: a change shows where it is. Without `said` what was said stays."""
    said = said or json.loads(path.read_text())["said"]
    text = json.dumps({"said": said, "runs": runs}, ensure_ascii=False)
    path.write_text(text.replace('{"schedule"', '\n{"schedule"').replace('["generate", "prefill"',
                    '\n["generate", "prefill"') + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="runs/X")
    parser.add_argument("--schedules", nargs=2, type=Path, metavar=("SYNC", "ASYNC"))
    parser.add_argument("--collect", nargs="+", type=Path, metavar="SCHEDULE-SEED")
    parser.add_argument("--said", default="", help="machine, command, commit, date")
    given = parser.parse_args()
    if given.schedules:
        runs = {}
        for name, folder in zip(("sync", "async"), given.schedules):
            run = read_run(folder)
            runs[name] = {"schedule": name, "rollouts_sha256": run["rollouts_sha256"],
                          "weights_sha256": run["weights_sha256"], "spans": last_period(folder)}
        store(RESULTS / "schedules.json", given.said, runs)
    if given.collect:
        runs = [dict(zip(("schedule", "seed"), (folder.name.split("-")[0],
                     int(folder.name.split("-")[1])))) | read_run(folder)
                for folder in given.collect
                if any(m.stat().st_size for m in folder.glob("metrics.jsonl"))]
        store(RESULTS / "learning.json", given.said, runs)
    for folder in given.folders:
        draw_run(folder)
    if not given.folders:
        draw_all(RESULTS, RESULTS)


if __name__ == "__main__":
    main()
