"""The ledger: whole in both languages, calls what it says, passes nothing broken, and sees a broken library."""

import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import jax
import numpy as np
import pytest

import launch
from experiments import claims
from experiments.claims import ledger, mapping, page, record, scaling_integrals, surprising, table, training
from experiments.claims.record import Caveat, Chapter, Claim, Numbers, Verdict, Words, at_least, at_most, near, shown
from experiments.grid import Arm
from experiments.sweep import Question
from tests.claim_texts import misprinted, untranslated
from tests.mutants import MUTANTS
from transformer_jax.config import Config, Hyper
from transformer_jax.errors import UserError

ROWS = {"A": 14, "B": 22, "C": 14, "D": 13, "E": 18, "F": 9, "G": 16, "H": 18, "I": 9, "J": 7}
BOOK = claims.chapters()
CLAIMS = {claim.id: claim for chapter in BOOK for claim in chapter.claims}
CHINESE = re.compile(r"[\u4e00-\u9fff]")
# What is said of these articles' sentences needs a reason.
EXPLAINED = (Verdict.WRONG, Verdict.CONDITIONAL, Verdict.IMPRECISE, Verdict.OVERCLAIM, Verdict.UNVERIFIABLE)


# --- the records ---------------------------------------------------------------------


def test_every_row_is_there_in_its_order() -> None:
    assert [chapter.letter for chapter in BOOK] == list(ROWS)
    for chapter in BOOK:
        wanted = [f"{chapter.letter}{i:02d}" for i in range(1, ROWS[chapter.letter] + 1)]
        assert [claim.id for claim in chapter.claims] == wanted


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_a_record_is_whole_in_both_languages(claim: Claim) -> None:
    assert re.match(r"(S[0-3] |derived|missing|cross)", claim.source), claim.source
    for words in (claim.says, claim.finding, claim.learned):
        if words is not None:
            assert words.en.isascii() or not CHINESE.search(words.en)
            assert CHINESE.search(words.zh), words.zh
            assert places(words.en) == places(words.zh)
    if claim.verdict in EXPLAINED:
        assert claim.finding or claim.learned, "a verdict of this kind says why"
    assert (claim.measure is None and claim.train is None) == (claim.verdict is Verdict.UNVERIFIABLE)
    assert claim.uses or claim.measure or claim.verdict is Verdict.UNVERIFIABLE
    if claim.formula:
        assert not re.search(r"\\text\{[^}]* [^}]*\}", claim.formula), "formulas are shared by both languages"
        made = page.mathml(claim.formula)
        assert "\\" not in re.sub(r"<[^>]*>", "", made), made


def places(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)", text))


# --- the checks ----------------------------------------------------------------------


def executed(step: Callable[[], Any]) -> set[Any]:
    """The code objects of Python functions that a call ran."""
    seen: set[Any] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return seen


def codes_of(use: Any) -> set[Any]:
    """The code of a function, or of a class's own methods."""
    if inspect.isclass(use):
        methods = [inspect.unwrap(getattr(one, "fget", one)) for one in vars(use).values() if one]
        return {one.__code__ for one in methods if inspect.isfunction(one)} | (
            {use.__init__.__code__} if hasattr(use.__init__, "__code__") else set()
        )
    return {inspect.unwrap(use).__code__}


def forget(module: ModuleType) -> None:
    """Drop what a chapter and JAX keep from earlier calls."""
    for value in vars(module).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()
    jax.clear_caches()


@pytest.mark.parametrize("claim", [c for c in CLAIMS.values() if c.measure], ids=lambda claim: claim.id)
def test_a_quick_check_passes_and_calls_what_it_names(claim: Claim, tmp_path: Path) -> None:
    done: list[ledger.Checked] = []

    def step() -> None:
        done.append(ledger.check(claim, ledger.QUICK, tmp_path))

    seen = executed(step)
    assert done[0].status in ("passed", "at full depth", "unverifiable"), done[0].error or [
        table.said(n) for n in done[0].numbers if n.holds is False
    ]
    assert (done[0].passed is None) == (claim.verdict is Verdict.EMPIRICAL), "arithmetic is no experiment"
    names = [number.name for number in done[0].numbers]
    assert len(set(names)) == len(names), "two numbers of one name"
    for number in done[0].numbers:
        assert not (left := untranslated(number.label.zh)), f"{number.name}: {left} in {number.label.zh}"
    if claim.finding:
        for sentence in claim.finding:
            assert not (wrong := misprinted(sentence, done[0].numbers)), f"{wrong} in {sentence}"
    if not claim.uses:
        ran = {code.co_filename for code in seen}
        assert not [name for name in ran if f"{os.sep}transformer_jax{os.sep}" in name], (
            "which functions, it does not say"
        )
    if any(not codes_of(use) & seen for use in claim.uses):
        assert claim.measure is not None
        forget(sys.modules[claim.measure.__module__])
        seen = executed(step)
    missing = [ledger.name_of(use) for use in claim.uses if not codes_of(use) & seen]
    assert not missing, f"not called: {missing}"
    assert all(use.__module__.startswith("transformer_jax.") for use in claim.uses)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "holds"),
    [
        (near("a", Words("", ""), 1.0, 1.5, 0.5), True),
        (near("a", Words("", ""), 1.0, 1.6, 0.5), False),
        (near("a", Words("", ""), float("inf"), float("inf")), True),
        (near("a", Words("", ""), float("nan"), float("nan"), 9.0), False),
        (at_most("a", Words("", ""), 1.0, 1.0), True),
        (at_most("a", Words("", ""), 1.1, 1.0), False),
        (at_most("a", Words("", ""), float("nan"), 1.0), False),
        (at_least("a", Words("", ""), 1.0, 1.0), True),
        (at_least("a", Words("", ""), 0.9, 1.0), False),
        (at_least("a", Words("", ""), float("nan"), 1.0), False),
        (shown("a", Words("", ""), float("nan")), None),
    ],
)
def test_what_holds(number: record.Number, holds: bool | None) -> None:
    assert number.holds is holds


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0, 8.0])
def test_the_integrals_of_two_weights_are_those_of_their_difference(sigma: float) -> None:
    """Of two scores d apart, d normal of variance 2σ², the weights are 1/(1 + exp ±d): one integral over d."""
    d, step = np.linspace(-9 * 2**0.5 * sigma, 9 * 2**0.5 * sigma, 200_001, retstep=True)
    density = np.exp(-((d / sigma) ** 2) / 4) / np.sqrt(4 * np.pi) / sigma * step
    least = 1 / (1 + np.exp(np.abs(d)))
    nats = -least * np.log(least) - (1 - least) * np.log1p(-least)
    assert scaling_integrals.mean_top(2, sigma) == pytest.approx(np.sum(density * (1 - least)), abs=2e-4)
    assert scaling_integrals.mean_entropy(2, sigma) == pytest.approx(np.sum(density * nats), abs=1e-4)


def of(measure: Callable[[], Numbers] | None, verdict: Verdict = Verdict.TRUE, finding: Words | None = None) -> Claim:
    claim = Chapter("Z", Words("", "")).claim("Z01", "S0 §1", verdict, Words("", ""), finding=finding)
    if measure:
        claim.quick(measure)
    return claim


def test_a_check_that_raises_or_judges_nothing_does_not_pass(tmp_path: Path) -> None:
    def raises() -> Numbers:
        yield near("fine", Words("", ""), 0.0, 0.0)
        raise ZeroDivisionError("by hand")

    def judges_nothing() -> Numbers:
        yield shown("x", Words("", ""), 1.0)

    def fine() -> Numbers:
        yield near("x", Words("", ""), 1.0, 1.0)

    broken = ledger.check(of(raises), ledger.QUICK, tmp_path)
    assert (broken.status, broken.passed) == ("broken", False) and "by hand" in broken.error
    assert ledger.check(of(judges_nothing), ledger.QUICK, tmp_path).status == "failed"
    unknown_place = ledger.check(of(fine, finding=Words("{y}", "{y}")), ledger.QUICK, tmp_path)
    assert unknown_place.status == "broken"
    nothing = ledger.check(of(None, Verdict.UNVERIFIABLE, Words("why", "")), ledger.QUICK, tmp_path)
    assert (nothing.status, nothing.passed) == ("unverifiable", None) and nothing.said[0].en == "why"
    filled = ledger.check(of(fine, finding=Words("{x:.1f}", "{x:.2f}")), ledger.QUICK, tmp_path)
    assert (filled.status, filled.said[0]) == ("passed", Words("1.0", "1.00"))


def test_what_trains_waits_for_full_depth(tmp_path: Path) -> None:
    claim, folders = of(None, Verdict.EMPIRICAL, Words("{x:.0f}", "{x:.0f}")), []

    @claim.full
    def train(folder: Path) -> Numbers:
        folders.append(folder)
        yield near("x", Words("", ""), 3.0, 3.0)

    waiting = ledger.check(claim, ledger.QUICK, tmp_path)
    assert (waiting.status, waiting.passed, folders) == ("at full depth", None, [])
    claim.quick(lambda: [near("x", Words("", ""), 1.0, 1.0)])
    arithmetic = ledger.check(claim, ledger.QUICK, tmp_path)
    assert (arithmetic.status, arithmetic.passed, folders) == ("at full depth", None, [])
    both = ledger.check(claim, ledger.FULL, tmp_path)
    assert [number["name"] for number in ledger.record(both)["numbers"]] == ["x", "trained_x"] and both.passed
    folders.clear()
    claim.measure = None
    trained = ledger.check(claim, ledger.FULL, tmp_path)
    assert (trained.status, trained.said[0].en, folders) == ("passed", "3", [tmp_path / "Z01"])


def test_a_caveat_is_shown_with_its_claim_and_other_warnings_go_on(tmp_path: Path) -> None:
    def warns() -> Numbers:
        for _ in range(2):
            warnings.warn(Caveat(Words("beware", "注意")), stacklevel=2)
        warnings.warn("of another kind", UserWarning, stacklevel=2)
        yield near("x", Words("", ""), 1.0, 1.0)

    with pytest.warns(UserWarning, match="of another kind") as caught, warnings.catch_warnings():
        warnings.simplefilter("always")
        one = ledger.check(of(warns), ledger.QUICK, tmp_path)
    assert one.status == "passed" and one.caveats == (Words("beware", "注意"),)
    assert len(caught) == 1


def test_a_best_rate_at_an_end_of_its_range_is_a_caveat(tmp_path: Path) -> None:
    config = Config(task="copy", d_model=8, num_heads=2, num_layers=1, seq_len=9, batch_size=4, steps=2)
    question = Question("ends", "?", (Arm("only", config, Hyper()),), learning_rates=(1e-3, 1e-2), comparisons=())
    with pytest.warns(Caveat, match=r"only: the best learning_rate=0.01? is the \w+ tried") as caught:
        found, _ = training.trained(question, 2, tmp_path / "w")
    assert isinstance(caught[0].message, Caveat) and "学习率" in caught[0].message.words.zh
    assert found["arms"][0]["best_learning_rate"] in (1e-3, 1e-2)


# --- the run -------------------------------------------------------------------------


def test_ids_and_letters_choose() -> None:
    assert [claim.id for claim in ledger.chosen(BOOK, "d07, B12")] == ["B12", "D07"]
    assert len(ledger.chosen(BOOK, "J")) == ROWS["J"] and len(ledger.chosen(BOOK, "")) == sum(ROWS.values())
    with pytest.raises(UserError, match="no claim D7; near: D07"):
        ledger.chosen(BOOK, "D7")


class Page(HTMLParser):
    """What a page loads, its articles, and the text in each language."""

    def __init__(self, text: str):
        super().__init__()
        self.loads: list[str] = []
        self.articles: list[str] = []
        self.languages: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [str(given[name]) for name in ("src", "data", "srcset") if given.get(name)]
        self.loads += [str(given["href"])] if tag == "link" else []
        if tag == "article":
            self.articles.append(str(given["id"]))
        if tag == "span" and "lang" in given:
            self.languages[str(given["lang"])] = self.languages.get(str(given["lang"]), 0) + 1


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A run of four claims, one of which is broken and one off."""
    folder = tmp_path_factory.mktemp("claims") / "run"

    def raises() -> Numbers:
        raise RuntimeError("the check is broken")

    def off() -> Numbers:
        warnings.warn(Caveat(Words("rates end here", "学习率到此为止")), stacklevel=2)
        yield near("x", Words("off", "偏差"), float("nan"), 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CLAIMS["A01"], "measure", raises)
        patch.setattr(CLAIMS["E09"], "measure", off)
        code = launch.main(["launch.py", "--experiment=claims", "--only=A01,A14,E08,E09,A10", f"--workdir={folder}"])
    yield code, folder


def test_a_broken_check_ends_nothing_and_fails_the_run(ran: tuple[int, Path]) -> None:
    code, folder = ran
    assert code == 1
    rows = {row["id"]: row for row in json.loads((folder / "claims.json").read_text(encoding="utf-8"))}
    statuses = {id: (row["status"], row["passed"]) for id, row in rows.items()}
    assert statuses == {
        "A01": ("broken", False),
        "A10": ("passed", True),
        "A14": ("unverifiable", None),
        "E08": ("passed", True),
        "E09": ("failed", False),
    }
    assert "the check is broken" in rows["A01"]["error"]
    wanted = {"id", "verdict", "predicted", "measured", "tolerance", "dtype", "passed", "seconds", "functions"}
    assert all(wanted <= set(row) for row in rows.values())
    assert rows["E09"]["measured"] == "nan"
    assert rows["E09"]["caveats"] == [{"en": "rates end here", "zh": "学习率到此为止"}] and not rows["E08"]["caveats"]


def test_a_ledger_of_other_claims_is_kept(ran: tuple[int, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(ran[1], tmp_path / "w")
    assert launch.main(["launch.py", "--experiment=claims", "--only=E03", f"--workdir={folder}"]) == 0
    now, before = (json.loads((folder / name).read_text()) for name in ("claims.json", "old-claims.json"))
    assert [row["id"] for row in now] == ["E03"] and len(before) == 5


def test_an_interrupt_keeps_what_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Numbers:
        raise KeyboardInterrupt("SIGTERM received")

    monkeypatch.setattr(CLAIMS["E09"], "measure", interrupted)
    assert launch.main(["launch.py", "--experiment=claims", "--only=E03,E09", f"--workdir={tmp_path / 'w'}"]) == 143
    assert [row["id"] for row in json.loads((tmp_path / "w" / "claims.json").read_text())] == ["E03"]


def test_the_page_has_both_languages_and_loads_nothing(ran: tuple[int, Path]) -> None:
    text = (ran[1] / "claims.html").read_text(encoding="utf-8")
    found = Page(text)
    assert found.articles == ["A01", "A10", "A14", "E08", "E09"]
    assert found.languages["en"] == found.languages["zh"] > 50
    assert found.loads and all(load.startswith("data:image/png;base64,") for load in found.loads)
    assert "@import" not in text and "url(" not in text
    assert "the check is broken" in text and "<math" in text
    assert "rates end here" in text and "学习率到此为止" in text
    for row in mapping.ROWS:
        assert row.mathematics.zh in text


def test_every_row_of_the_map_leads_to_functions() -> None:
    for row in mapping.mapped(BOOK):
        assert row.functions, row.row
        assert all(re.fullmatch(r"transformer_jax(\.\w+)+", name) for name in row.functions)


NUMBER = re.compile(r"\d[\d.]*(?:e[-+−]\d+)?")


def test_the_readmes_show_what_the_ledger_measures(tmp_path: Path) -> None:
    chosen = [ledger.check(CLAIMS[id], ledger.QUICK, tmp_path) for id in surprising.IDS]
    for name, language in surprising.READMES.items():
        text = (Path(__file__).resolve().parent.parent / name).read_text(encoding="utf-8")
        shown, measured = surprising.block(text), surprising.table(chosen, language)
        assert NUMBER.sub("#", shown) == NUMBER.sub("#", measured), f"{name}: run experiments.claims.surprising"
        for a, b in zip(NUMBER.findall(shown), NUMBER.findall(measured), strict=True):
            x, y = (float(one.rstrip(".").replace("−", "-")) for one in (a, b))
            # Roundings differ between compilers and machines, what is measured does not: of an error that is nothing
            # but rounding, given by one digit, the size is what must agree.
            assert x == pytest.approx(y, rel=0.1) or ("e" in a and max(x, y) < 1e-4 and x / 8 <= y <= 8 * x), (a, b)


# --- mutants -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def caught() -> list[dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutate"],
        input=json.dumps([mutant[1:] for mutant in MUTANTS]),
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("i", range(len(MUTANTS)), ids=[mutant[0] for mutant in MUTANTS])
def test_the_ledger_sees_that_the_library_is_broken(i: int, caught: list[dict[str, str]]) -> None:
    assert set(caught[i]) == set(MUTANTS[i].claims), caught[i]
    assert set(caught[i].values()) == {"failed"}
