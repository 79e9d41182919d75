"""The complexity experiment: formulas against the meter and against loops, fair timing, verdicts that follow."""

import contextlib
import io
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import launch
from experiments import complexity, plots, plots_complexity
from experiments.complexity import BOTH, DIRECTIONS, FORWARD, METHODS, WIDTH

# --- counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [128, 131, 257, 769])
@pytest.mark.parametrize("name", METHODS)
def test_formulas_are_what_the_meter_counts(name: str, T: int) -> None:
    for direction in DIRECTIONS:
        cost = complexity.count(name, direction, T)
        assert cost.products == complexity.by_hand(name, direction, T)
        assert cost.least_products == (0 if name == "blockwise" else cost.products)


def test_formulas_at_hand_values() -> None:
    # 512² pairs of 64 wide: 2^18 * 2^7 = 2^25 for a product.
    assert complexity.by_hand("dense", FORWARD, 512) == 2 * 2**25
    assert complexity.by_hand("blockwise", BOTH, 512) == 8 * 2**25
    # 512 queries against 3 blocks of 64 keys.
    assert complexity.by_hand("banded", BOTH, 512) == 7 * 512 * 192 * 128
    assert complexity.by_hand("linear", FORWARD, 512) == 512 * (64 * (128 + 130) + 4 * 64 * 65)


@pytest.mark.parametrize("T", [512, 769, 1031])
def test_blocks_that_are_run_are_those_in_which_the_mask_allows_something(T: int) -> None:
    blocks, size = complexity._blocks(T)
    allowed = np.zeros((blocks * size, blocks * size), bool)
    allowed[:T, :T] = np.asarray(complexity.mask_of("blockwise").dense(T, T))[0, 0]
    some = sum(
        allowed[i * size : (i + 1) * size, j * size : (j + 1) * size].any()
        for i in range(blocks)
        for j in range(blocks)
    )
    for direction, products in ((FORWARD, 3), (BOTH, 8)):
        assert complexity.taken("blockwise", direction, T) == some * products * 2 * WIDTH * size * size
    assert complexity.taken("dense", BOTH, T) == complexity.by_hand("dense", BOTH, T)


def test_pairs_against_a_loop() -> None:
    n, w = 23, 5
    rules: dict[str, Callable[[int, int], bool]] = {
        "full": lambda i, j: True,
        "causal": lambda i, j: j <= i,
        "window": lambda i, j: i - w < j <= i,
    }
    counts = complexity.pairs(n, w)
    assert len(counts) == len(rules)
    for kind, found in counts.items():
        allows = rules[kind.split(",")[0]]
        assert found == (want := sum(allows(i, j) for i in range(n) for j in range(n)), want)
        assert want != math.comb(n, 2)


@pytest.mark.parametrize("d", [8, 13])
def test_attention_dominates_beyond_six_d(d: int) -> None:
    # Multiply-adds of a row: n keys, q.k and weights.v; against q, k, v, out and the net's two of 4 d.
    wins = [n for n in range(1, 10 * d) if 2 * n * d > 4 * d * d + 2 * 4 * d * d]
    assert complexity.crossing(d) == wins[0] == 6 * d + 1


def test_only_linear_attention_is_another_function() -> None:
    gaps = complexity.differences(131)
    assert gaps["blockwise"] < 1e-5 and gaps["banded"] < 1e-5
    # Against a float64 loop: phi(q).phi(k) over their sum, and softmax.
    q, k, v = (np.asarray(x, np.float64)[0, :, 0] for x in complexity.arguments(131, FORWARD))
    phi = [np.where(x > 0, x + 1, np.exp(x)) for x in (q / math.sqrt(WIDTH), k)]
    soft, linear = np.zeros_like(v), np.zeros_like(v)
    for i in range(131):
        for out, weights in (
            (soft, np.exp(k[: i + 1] @ q[i] / math.sqrt(WIDTH))),
            (linear, phi[1][: i + 1] @ phi[0][i]),
        ):
            out[i] = weights @ v[: i + 1] / weights.sum()
    assert gaps["linear"] == pytest.approx(np.linalg.norm(linear - soft) / np.linalg.norm(soft), rel=1e-4)


# --- times -------------------------------------------------------------------------------------


class Clock:
    """A clock that calls push on; everything takes `drift` times longer with each second that has passed."""

    def __init__(self, drift: float = 0.0):
        self.now, self.drift, self.order = 0.0, drift, []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, seconds: float) -> Callable[[], Any]:
        def call() -> Any:
            self.now += seconds * (1 + self.drift * self.now)
            self.order.append(name)
            return jnp.zeros(())

        return call


def test_interleaved_times_are_those_of_the_calls() -> None:
    clock = Clock()
    found = complexity.interleaved({"a": clock.work("a", 0.25), "b": clock.work("b", 0.001)}, 4, clock=clock)
    assert found == {"a": pytest.approx([0.25] * 4), "b": pytest.approx([0.001] * 4)}
    # Two calls first; then short ones five times in a turn, forth and back.
    assert "".join(clock.order) == "aabb" + 2 * ("abbbbb" + "bbbbba")


def test_a_slowing_machine_does_not_change_ratios() -> None:
    clock = Clock(drift=0.01)
    found = complexity.interleaved({"a": clock.work("a", 1.0), "b": clock.work("b", 1.0)}, 8, clock=clock)
    assert found["a"][-1] > 1.1 * found["a"][0]
    medians = [complexity.summary(found[name])["median_seconds"] for name in "ab"]
    assert medians[0] == pytest.approx(medians[1], rel=0.001)


def test_rounds_end_with_the_time_but_not_before_three() -> None:
    for seconds, rounds in ((0.1, 3), (4.5, 5), (100.0, 9)):
        clock = Clock()
        found = complexity.interleaved({"a": clock.work("a", 1.0)}, 9, seconds, clock=clock)
        assert len(found["a"]) == rounds
    clock = Clock()
    calls = {"a": clock.work("a", 1.0)}
    assert complexity.interleaved(calls, 9, stopped=lambda: clock.now >= 6, clock=clock) == {"a": [1.0] * 4}


@pytest.mark.parametrize("seconds", [[3.0, 1.0, 7.0], [4.0, 1.0, 3.0, 7.0], [2.0]])
def test_summary(seconds: list[float]) -> None:
    assert complexity.summary(seconds) == {
        "median_seconds": np.median(seconds),
        "least_seconds": min(seconds),
        "rounds": len(seconds),
    }


# --- rows and slopes -------------------------------------------------------------------------------


def test_what_needs_too_much_is_not_run_and_says_so() -> None:
    limit = 8 * 2**20
    rows = complexity.rows_of([256, 1024], limit)
    over = {(row["method"], row["T"]) for row in rows if row["skipped"]}
    # Two float32 arrays of 1024² have 8 MiB already.
    assert over == {("dense", 1024), ("dense, window", 1024)}
    for row in rows:
        need = complexity.count(row["method"], row["direction"], row["T"]).peak_bytes
        assert bool(row["skipped"]) == (need > limit)
    (line, *_) = [row["skipped"] for row in rows if row["skipped"]]
    assert "GiB by the meter" in line and "limit 0.0078125 GiB" in line
    dense = [row for row in rows if row["method"] == "dense" and row["direction"] == FORWARD]
    assert complexity.add_times(dense, 3, 1.0, lambda: False)
    assert "median_seconds" in dense[0] and dense[0]["rounds"] == 3 and "median_seconds" not in dense[1]


def test_slopes_are_those_that_were_put_in() -> None:
    powers = {name: 0.5 + i / 4 for i, name in enumerate(METHODS)}
    rows = [
        {"method": m, "direction": d, "T": T, "products": T ** powers[m], "working_bytes": 3 * T**2}
        | ({"median_seconds": 0.1 * T ** (2 * powers[m])} if m != "dense" or T < 9 else {})
        for T in (4, 8, 16, 32)
        for d in DIRECTIONS
        for m in METHODS
    ]
    found = complexity.slopes_of(rows)
    assert [(entry["direction"], entry["method"]) for entry in found] == [(d, m) for d in DIRECTIONS for m in METHODS]
    for entry in found:
        power = powers[entry["method"]]
        assert entry["FLOPs"] == {"value": pytest.approx(power), "error": pytest.approx(0, abs=1e-9)}
        assert entry["bytes"]["value"] == pytest.approx(2)
        if entry["method"] == "dense":  # two lengths were timed: no slope
            assert entry["time"] is None
        else:
            assert entry["time"]["value"] == pytest.approx(2 * power)
    assert plots_complexity.exponent(None) == "–"
    assert plots_complexity.exponent({"value": 1.985, "error": 0.031}) == "1.99 ± 0.03"


# --- the whole ---------------------------------------------------------------------------------------

SMALL = (128, 192, 640)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("complexity")


@pytest.fixture(scope="module")
def first(folder: Path) -> tuple[dict[str, Any], str]:
    """A run over short rows, with dense attention of the longest beyond the limit: results, and what it printed."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", "80")
        patch.setattr(complexity, "LENGTHS", {"quick": SMALL, "full": SMALL})
        patch.setattr(complexity, "ROUNDS", 3)
        patch.setattr(complexity, "MODEL_WIDTHS", (8,))
        patch.setattr(complexity.rows_of, "__defaults__", (5 * 2**20,))
        assert launch.main(["launch.py", "--experiment=complexity", f"--workdir={folder / 'w'}"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    return json.loads((folder / "w/complexity.json").read_text(), parse_constant=refuse), out.getvalue()


def again(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(complexity, "LENGTHS", {"quick": SMALL, "full": SMALL})
    return launch.main(["launch.py", "--experiment=complexity", f"--workdir={folder / 'w'}", *flags])


def test_every_number_is_kept(first: tuple[dict[str, Any], str]) -> None:
    results, _ = first
    rows = results["rows"]
    assert len(rows) == len(SMALL) * len(DIRECTIONS) * len(METHODS)
    assert {"python", "jax", "jaxlib"} <= set(results["versions"]) and len(results["load"]) == 2
    skipped = {(row["method"], row["T"]) for row in rows if row["skipped"]}
    assert skipped == {("dense", SMALL[-1]), ("dense, window", SMALL[-1])}
    for row in rows:
        assert row["products"] == row["by_hand"]
        assert row["skipped"] or (row["rounds"] == 3 and 0 < row["least_seconds"] <= row["median_seconds"])


def test_the_terminal_shows_it_in_80_columns(first: tuple[dict[str, Any], str]) -> None:
    results, text = first
    lines = text.splitlines()
    assert max(map(len, lines[: lines.index(next(line for line in lines if line.startswith("Picture")))])) <= 80
    words = " ".join(text.split())
    for row in results["rows"]:
        if row["T"] == SMALL[0]:
            assert f"{row['by_hand']:,}" in words
        if row["skipped"]:
            assert f"not run: {row['method']}, {row['direction']}, T {row['T']}" in words and row["skipped"] in words
    for entry in results["slopes"]:
        shown = " ".join(plots_complexity.exponent(entry[name]) for name in ("time", "FLOPs", "bytes"))
        assert f"{entry['method']} {shown}" in words
    assert words.count("at every T") == 2 * len(METHODS)
    assert "523,776" in words and "1,048,576" in words and "524,800" in words and "122,944" in words
    assert "n = 49 at d = 8" in words
    assert not any(word in words for word in ("nan", "None", "…"))


def test_the_same_command_reprints_and_another_is_refused(
    first: tuple[dict[str, Any], str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: (folder / "w" / name).read_bytes() for name in ("complexity.json", "complexity.png")}
    with monkeypatch.context() as patch:
        patch.setattr(complexity, "results_of", lambda *_: pytest.fail("it measured again"))
        assert again(folder, patch) == 0
        assert capsys.readouterr().out == first[1]
        (folder / "w/complexity.png").unlink()
        assert again(folder, patch) == 0  # and draws what is missing
        assert {name: (folder / "w" / name).read_bytes() for name in files} == files
        capsys.readouterr()
        assert again(folder, patch, "--depth=full") == 2
        err = capsys.readouterr().err
        assert "depth is 'quick' there, 'full' here" in err and err.count("\n") == 1
    monkeypatch.setattr(complexity, "results_of", lambda *_: first[0])
    assert again(folder, monkeypatch, "--overwrite") == 0
    assert (folder / "w.old-1/complexity.json").exists() and (folder / "w/complexity.json").exists()


def test_a_signal_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(T: int, direction: str) -> list[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(T, direction)

    real = complexity.arguments
    monkeypatch.setattr(complexity, "arguments", interrupted)
    monkeypatch.setattr(complexity, "METHODS", ("linear",))
    monkeypatch.setattr(complexity, "DIRECTIONS", (FORWARD,))
    assert again(tmp_path, monkeypatch) == 128 + signal.SIGTERM
    assert "SIGTERM received" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == [".lock", "config.json"]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--d_model=64", "--d_model has no effect in --experiment=complexity"),
        ("--window=7", "--window has no effect"),
        ("--seeds=2", "--seeds has no effect"),
        ("--depth=deep", "--depth=deep: choose from quick, full"),
    ],
)
def test_a_mistake_is_one_line(flag: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["launch.py", "--experiment=complexity", f"--workdir={tmp_path / 'w'}", flag]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not (tmp_path / "w").exists()


def verdicts(results: dict[str, Any]) -> list[str]:
    return [claim["verdict"] for claim in plots_complexity.claims_of(results)]


def test_verdicts_follow_the_numbers(first: tuple[dict[str, Any], str]) -> None:
    results = first[0]

    def changed(change: Callable[[dict[str, Any]], Any]) -> dict[int, str]:
        other = json.loads(json.dumps(results))
        for entry in other["slopes"]:
            if entry["method"].startswith("dense"):
                entry["bytes"], entry["time"] = {"value": 2.0, "error": 0.0}, {"value": 2.1, "error": 0.1}
            if entry["method"] == "blockwise":
                entry["bytes"]["value"] = 0.7
        before = verdicts(other)
        change(other)
        return {i: new for i, (old, new) in enumerate(zip(before, verdicts(other), strict=True)) if old != new}

    def entry(other: dict[str, Any], name: str) -> dict[str, Any]:
        return next(e for e in other["slopes"] if (e["method"], e["direction"]) == (name, BOTH))

    assert changed(lambda r: None) == {}
    assert changed(lambda r: entry(r, "dense")["FLOPs"].update(value=1.8)) == {0: "not found"}
    assert changed(lambda r: r["crossings"][0].update(length=50)) == {1: "another crossing"}
    assert changed(lambda r: entry(r, "blockwise")["bytes"].update(value=1.3)) == {2: "not found"}
    assert changed(lambda r: r["pairs"].update(article=524_800)) == {3: "right"}
    assert changed(lambda r: r.update(window=122_944 / 1024)) == {4: "right"}
    assert changed(lambda r: entry(r, "banded")["FLOPs"].update(value=2.0)) == {5: "not found"}
    assert changed(lambda r: entry(r, "linear")["FLOPs"].update(value=2.0)) == {6: "not found"}
    assert changed(lambda r: r["differences"].update(banded=0.1)) == {7: "wrong"}


def test_long_times_are_not_cut(first: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    results = json.loads(json.dumps(first[0]))
    for row in results["rows"]:
        slow = {"dense": 12.591, "dense, window": 12.86}.get(row["method"], 5.096)
        row["T"] = {SMALL[-1]: 16384}.get(row["T"], row["T"])
        row.update(median_seconds=slow, least_seconds=slow - 0.2)
    out = io.StringIO()
    plots_complexity.print_results(results, tmp_path, console=Console(file=out, width=80))
    assert "12591 (12391)" in out.getvalue() and "5096 (4896)" in out.getvalue() and "…" not in out.getvalue()


def test_a_formula_that_fails_is_named(first: tuple[dict[str, Any], str]) -> None:
    rows = json.loads(json.dumps(first[0]["rows"]))
    wrong = next(row for row in rows if (row["method"], row["direction"], row["T"]) == ("banded", BOTH, 192))
    wrong["by_hand"] += 1
    equal = {line[0]: line[3] for line in plots_complexity._formulas(rows, BOTH)}
    assert equal == dict.fromkeys(METHODS, "at every T") | {"banded": "not at T 192"}


def test_the_picture_has_every_line_in_every_panel(first: tuple[dict[str, Any], str], folder: Path) -> None:
    with Image.open(folder / "w/complexity.png") as picture:
        assert picture.width >= 900
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    # The lines' part, without the legend at the right.
    panels = np.array_split(pixels[:, : int(0.64 * pixels.shape[1])], 3)
    assert len(panels) == 3
    for panel in panels:
        for i in range(len(METHODS)):
            wanted = np.array([int(plots.colour(i)[j : j + 2], 16) for j in (1, 3, 5)])
            assert (np.abs(panel - wanted).max(-1) < 12).sum() > 100, (METHODS[i], i)
