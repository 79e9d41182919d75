"""What the ledger prints: a line a claim as it is checked, then what failed, and the counts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.claims.ledger import Checked, check
from experiments.claims.record import Claim, Number, Relation, Verdict, Words
from experiments.terminal import console_of, say

MARKS = {"passed": "ok", "failed": "FAILED", "broken": "BROKEN", "unverifiable": "–", "at full depth": "full"}
STYLES = {"failed": "bold red", "broken": "bold red", "unverifiable": "dim", "at full depth": "dim"}
# What is said of these is that the article is not simply right, and where it fails.
EXPLAINED = (Verdict.WRONG, Verdict.CONDITIONAL, Verdict.OVERCLAIM)


def watch(claims: Sequence[Claim], depth: str, folder: Path) -> Iterator[Checked]:
    """Check one claim after the other, and say each as it is known."""
    console = console_of(None)
    for claim in claims:
        one = check(claim, depth, folder)
        head = one.headline
        number = "" if head is None else said(head)
        line = f"{claim.id}  {MARKS[one.status]:6}  {claim.verdict:12}  {one.seconds:5.1f} s  {number}"
        say(console, line.rstrip(), STYLES.get(one.status, ""))
        if claim.verdict in EXPLAINED:
            for words in one.said:
                say(console, f"     {words.en}", "dim")
        for words in one.caveats:
            say(console, f"     {words.en}", "yellow")
        yield one


def said(number: Number, language: int = 0) -> str:
    """measured, its relation to what was predicted, in a few digits."""
    label: Words = number.label
    text = f"{label[language]}: {short(number.measured)}"
    if number.relation is Relation.SHOWN or number.predicted is None:
        return text
    if number.relation is Relation.NEAR:
        return f"{text} = {short(number.predicted)}" + (f" ± {short(number.tolerance)}" if number.tolerance else "")
    return f"{text} {number.relation} {short(number.predicted)}"


def short(x: float) -> str:
    """Four significant digits; a whole number as it is, with a real minus."""
    text = f"{x:,.0f}" if abs(x) < 1e7 and x == round(x) else f"{x:.4g}"
    return text.replace("-", "−")


def conclude(checked: Sequence[Checked], folder: Path) -> int:
    """Print the errors, the counts and where the page is; the exit code."""
    console = console_of(None)
    bad = [one for one in checked if one.status in ("failed", "broken")]
    for one in bad:
        say(console)
        say(console, f"{one.claim.id} {one.status}: {one.claim.says.en}", "bold red")
        for number in one.numbers:
            if number.holds is False:
                say(console, f"  {said(number)}  ({number.dtype})")
        if one.error:
            say(console, one.error.rstrip())
    counts = Counter(one.status for one in checked)
    parts = [f"{count} {status}" for status, count in counts.items()]
    seconds = sum(one.seconds for one in checked)
    say(console)
    say(console, f"{len(checked)} claims in {seconds:.0f} s: {', '.join(parts)}", "bold")
    say(console, f"Page: {folder / 'claims.html'}")
    return 1 if bad else 0
