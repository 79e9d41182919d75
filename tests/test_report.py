"""The report and the terminal: every number and name arrives, nothing is loaded, nothing is cut or misread."""

import base64
import html
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from experiments import plots, report, results, terminal
from experiments.grid import Arm, Run
from experiments.program import Certificate
from experiments.sections import Section
from experiments.sweep import Outcome, Question, RunResult
from transformer_jax.config import Config, Hyper

# Markup of HTML, of matplotlib's formulas (a broken one), and of rich.
HOSTILE = "<b>&\"'$\\frac$ [red]"
NAMES = ("d_k=16 off", "d_k=16 on", HOSTILE)
RATES = (1e-3, 3e-3, 1e-2)
STEPS, SEEDS, MARKS = 60, 3, (0, 20, 40, 60)
LOST = Run(0, 1e-2, 1)  # one seed of one rate
DEAD = 1  # the arm of which every run diverges


def run_of(final: float, seed: int, diverges: int | None) -> RunResult:
    """A loss that falls to about `final`; NaN from step `diverges` on."""
    rng = np.random.default_rng(seed)
    loss = final + 3 * np.exp(-np.arange(STEPS) / 10) + rng.normal(0, 0.01, STEPS)
    at = final + 3 * np.exp(-np.array(MARKS) / 10) + rng.normal(0, 0.01)
    names = ("report_loss", "selection_loss", "report_accuracy", "report_curve")
    measured = {name: at.copy() for name in names} | {"entropy": np.ones((len(MARKS), 2))}
    if diverges is not None:
        loss[diverges:] = np.nan
        for x in measured.values():
            x[np.array(MARKS) >= diverges] = np.nan
    return RunResult(loss, loss, MARKS, measured)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    config = Config(vocab_size=256, steps=STEPS)
    arms = tuple(Arm(name, config.replace(head_dim=16 * 4**i), Hyper()) for i, name in enumerate(NAMES))
    question = Question("fake", f"Is {HOSTILE} good?", arms, RATES, ((NAMES[0], NAMES[1]), (NAMES[0], NAMES[2])))
    out = Outcome(question, SEEDS, certificate=Certificate(2, 40, 2.5e-7), programs_compiled=3, wall_seconds=71.0)
    for i in range(len(arms)):
        for rate in RATES:
            for seed in range(SEEDS):
                run = Run(i, rate, seed)
                diverges = 25 if i == DEAD or run == LOST else None
                out.results[run] = run_of(2 + 0.1 * i + abs(np.log10(rate / 3e-3)), seed, diverges)
    return out


@pytest.fixture(scope="module")
def found(outcome: Outcome) -> dict:
    return results.build(outcome)


@pytest.fixture(scope="module")
def folder(outcome: Outcome, found: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    config = {"command": "launch.py --sweep=<i>", "versions": {"jax": "9.8.7"}, "commit": "c0ffee"}
    (path / "config.json").write_text(json.dumps(config | {"identity": {"data": "da7a"}}))

    def draw(at: Path) -> None:
        plots.lines(at, MARKS, {"a, layer 1": [1, 2, np.nan, 3]}, "step", "entropy")

    sections = [
        Section("Own <part>", "words & numbers", ("arm", "value"), [(HOSTILE, "1.5"), (NAMES[1], "nan")]),
        Section("Own picture", figure=("own.png", draw)),
    ]
    assert report.write(path, outcome, found, sections) == path / "report.html"
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def words(page: str) -> str:
    """What a reader sees: no tags, no style, entities resolved, runs of spaces as one."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_the_page_loads_nothing_and_runs_nothing(page: str):
    assert not re.search(r"<(script|link|iframe|object|embed|base)\b", page, re.IGNORECASE)
    assert not re.search(r"\son\w+\s*=", page)
    assert "@import" not in page and "url(" not in page
    for target in re.findall(r'(?:src|href|srcset|action)\s*=\s*["\']?([^"\'\s>]*)', page):
        assert target.startswith("data:image/png;base64,")
    assert '<meta name="viewport"' in page and "prefers-color-scheme: dark" in page


def test_pictures_are_whole_named_and_small(page: str, folder: Path):
    images = re.findall(r"<img [^>]*>", page)
    files = {path.read_bytes() for path in folder.glob("*.png")}
    assert len(images) == len(files) == 3
    for image in images:
        data = base64.b64decode(re.search(r"base64,([^\"]*)", image)[1], validate=True)
        assert data in files and data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) < 150_000
        width = int.from_bytes(data[16:20], "big")
        assert width >= 900
        assert re.search(r'alt="[^"]{5,}"', image)


def test_hostile_text_is_escaped_everywhere(page: str):
    for raw in ("<b>", "<i>", "<part>"):
        assert raw not in page
    assert "&lt;b&gt;&amp;" in page
    seen = words(page)
    assert f"Is {HOSTILE} good?" in seen and "Own <part>" in seen and "words & numbers" in seen
    assert "python launch.py --sweep=<i>" in seen


def test_the_page_holds_the_answer(page: str, found: dict):
    seen = words(page)
    assert " ".join(found["verdict"].split()) in seen
    assert found["would_change"]
    for line in found["would_change"]:
        assert line in seen
    for name in NAMES:
        assert seen.count(name) >= 5  # arms, comparisons, configuration …
    for fact in ("27 runs", "3 seeds", "60 steps each", "3 programs compiled", "71 s", "9.8.7", "c0ffee", "da7a"):
        assert fact in seen
    assert "2 arms re-run alone, largest difference 2.5e-07 over the first 40 steps" in seen
    assert "mean of" not in seen  # the best rates have all their seeds, or none
    assert "learning rate 0.01, seed 1: at step 25" in seen


def test_table_values_are_those_of_the_results(page: str, found: dict):
    seen = words(page)
    arm = found["arms"][0]["metrics"]["report_loss"]
    digits = report.digits_for(a["metrics"]["report_loss"]["ci95"] for a in found["arms"])
    low, high = arm["ci95"]
    assert f"{arm['mean']:.{digits}f} {low:.{digits}f} to {high:.{digits}f}" in seen
    for value in arm["per_seed"]:
        assert f"{value:.{digits}f}" in seen
    row = found["comparisons"][1]
    assert row["verdict"] in seen and f"{row['p']:.3f} floor 0.250" in seen


def test_no_nan_and_no_none_is_printed(page: str, found: dict):
    seen = words(page)
    assert not re.search(r"\b(nan|none|inf|null)\b", re.sub("(positions|rope_scaling) none", "", seen), re.IGNORECASE)
    assert found["arms"][DEAD]["metrics"]["report_loss"]["mean"] is None
    assert re.search(re.escape(NAMES[DEAD]) + r" \d\S* diverged –", seen)
    assert re.search(re.escape(NAMES[DEAD]) + " –", seen)  # the section's nan


def test_fields_are_told_apart(found: dict, page: str):
    alike, unlike = report.fields(found["arms"])
    assert unlike == {"head_dim": ["16", "64", "256"]}
    shared = dict(alike)
    assert shared["steps"] == "60" and shared["dk_exponent"] == "0.5" and shared["text"] == "–"
    assert "learning_rate" not in shared


def test_a_partly_diverged_best_rate_says_how_many_are_left(outcome: Outcome):
    row = {"per_seed": [2.0, None, 2.2], "mean": 2.1, "ci95": [1.0, 3.2]}
    arm = {
        "name": "a",
        "best_learning_rate": 0.1,
        "metrics": {"m": row},
        "learning_rates": [{"learning_rate": 0.1}],
        "diverged": [{"learning_rate": 0.1, "seed": 1, "step": 7}],
        "warning": "the best learning_rate=0.1 is the largest tried",
    }
    (shown,) = report._arms({"primary_metric": "m", "arms": [arm]})
    assert shown["survivors"] == "mean of 2 of 3 seeds" and shown["seeds"] == ["2.000", "diverged", "2.200"]
    assert shown["diverged"] == "1 of 3" and shown["warning"] == "the best learning rate 0.1 is the largest tried"


def test_a_folder_without_config_and_a_question_without_comparisons(outcome: Outcome, found: dict, tmp_path: Path):
    bare = {**found, "comparisons": [], "would_change": [], "notes": ["a note"]}
    seen = words(report.write(tmp_path, outcome, bare, []).read_text(encoding="utf-8"))
    assert "No losses are compared." in seen and "no record of the command" in seen and "a note" in seen


def test_numbers_in_words():
    assert report.fixed(-0.12345, 3, sign=True) == "−0.123" and report.fixed(float("nan"), 3) == "–"
    assert report.digits_for([[1.0, 1.1], None]) == 3 and report.digits_for([[1.0, 1.0004]]) == 5
    assert report.probability(0.03125) == "0.031" and report.probability(None) == "–"
    assert report.probability(2**-16) == "2e−05"
    assert [report.duration(s) for s in (5.04, 71, 600, 8000, 3e5)] == [
        "5 s",
        "71 s",
        "10 min",
        "2 h 13 min",
        "3.5 days",
    ]
    assert report.memory(1536) == "1.5 KiB" and report.memory(5 * 2**30) == "5 GiB"
    stray = SimpleNamespace(arms_checked=1, steps=1, max_abs_difference=float("inf"))
    assert "diverged where the other did not" in report.certificate(vars(stray))


def printed(show, *args, width: int = 80) -> str:
    out = io.StringIO()
    show(*args, console=Console(file=out, width=width))
    return out.getvalue()


def test_terminal_shows_every_arm_whole_in_80_columns(found: dict):
    stored = json.loads(json.dumps(found, allow_nan=False))  # as a later run reads it
    text = printed(terminal.print_results, stored, Path("runs/a"))
    lines = text.splitlines()
    for arm in found["arms"]:
        assert any(line.startswith(arm["name"]) for line in lines)
    for row in found["comparisons"]:
        assert any(f"{row['a']} − {row['b']}" in line for line in lines)
    assert " ".join(found["verdict"].split()) in " ".join(text.split())
    assert "runs/a/report.html" in text and "\x1b" not in text and found["title"] in text
    assert re.search(re.escape(NAMES[DEAD]) + r"\s+\S+\s+diverged\s+9 of 9", text)
    assert max(map(len, lines)) <= 80
    assert not re.search(r"\b(nan|None|…)\b", text)


def test_terminal_keeps_names_that_are_wider_than_the_screen(found: dict):
    long = "d_k=16 off, " + "num_layers=2, " * 9
    text = printed(terminal.print_results, json.loads(json.dumps(found).replace(NAMES[0], long)), Path("x"))
    assert f"{long}\n" in text and f"{long} − {NAMES[1]}" in text
    assert "best rate 0.003" in text


def test_terminal_says_each_warning_once(found: dict):
    arms = [{**arm, "warning": "the best learning_rate=0.01 is the largest tried"} for arm in found["arms"]]
    text = " ".join(printed(terminal.print_results, {**found, "arms": arms}, Path("x")).split())
    assert text.count("largest tried") == 1
    assert f"the largest tried ({', '.join(NAMES)})" in text


def test_plan(capsys: pytest.CaptureFixture):
    group = {"runs": 27, "parameters": 123456, "steps": 60, "flops": 2.5e12, "seconds": 400.0, "bytes": 3 * 2**20}
    plan = {"arms": list(NAMES), "learning_rates": list(RATES), "seeds": 3, "groups": [group, {**group, "runs": 1}]}
    terminal.print_plan(plan)
    text = capsys.readouterr().out
    for part in (*NAMES, "0.001, 0.003, 0.01", "3 seeds", "123,456", "7 min", "3 MiB", "28 runs", "13 min"):
        assert part in text
    assert "nothing was run" in text.lower() and max(map(len, text.splitlines())) <= 80


def test_lines_draws_gaps_many_series_and_empty_data(tmp_path: Path):
    x = [0, 1, 10, 100]
    many = {f"$arm_{i}, layer {j}": [1.0, np.nan, i + 1, j] for i in range(6) for j in (1, 2)}
    plots.lines(tmp_path / "many.png", x, many, "x", "y", log_x=True, log_y=True, bands={"$arm_0, layer 1": (x, x)})
    plots.lines(tmp_path / "gap.png", x, {"a": [1.0, np.nan, 1.0, 2.0]}, "x", "y")
    plots.lines(tmp_path / "nothing.png", x, {"_a": [np.nan] * 4}, "x", "y", log_y=True)
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size < 150_000


def test_a_gap_is_not_bridged(tmp_path: Path):
    from PIL import Image

    def ink(y: list[float], log_y: bool = False) -> int:
        """Pixels of the first arm's blue."""
        plots.lines(tmp_path / "a.png", [0, 1, 2, 3, 4], {"a": y}, "x", "y", log_y=log_y)
        pixels = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).astype(int)
        return int((np.abs(pixels - [0, 0x72, 0xB2]).sum(axis=-1) < 60).sum())

    assert 0 < ink([1, 1, np.nan, 1, 1]) < 0.75 * ink([1, 1, 1, 1, 1])
    assert ink([-1, -2, -3, -2, -1], log_y=True) > 0  # nothing for a log axis to show: a plain one


def test_names_of_layers_and_marks_of_arms():
    assert plots.split_layer("d_k=16 on, num_layers=4, layer 12") == ("d_k=16 on, num_layers=4", 12)
    assert plots.split_layer("plain") == ("plain", None)
    marks = [(plots.colour(i), plots.marker(i)) for i in range(24)]
    assert len(set(marks)) == 24
    assert report._dot(0) == {"colour": plots.colour(0), "shape": ""} and report._dot(9)["shape"] == " square"


def test_drawing_leaves_nothing_global(tmp_path: Path):
    import sys

    import matplotlib

    with matplotlib.rc_context({"axes.grid": False, "font.size": 3}):
        before = dict(matplotlib.rcParams)
        plots.lines(tmp_path / "a.png", [0, 1], {"a": [1, 2]}, "x", "y")
        assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_smoothing_keeps_the_mean_and_leaves_out_nan():
    at, means = plots.smoothed(np.array([1.0, 3.0, np.nan, 5.0, 7.0]), points=2)
    assert at.tolist() == [0.5, 2.5, 4.0] and means.tolist() == [2.0, 5.0, 7.0]
