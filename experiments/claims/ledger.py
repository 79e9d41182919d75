"""Checking the claims: which are asked for, what came out, and the record of it for claims.json."""

import contextlib
import dataclasses
import difflib
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.claims.record import Caveat, Chapter, Claim, Curves, Number, Verdict, Words, fill
from transformer_jax.errors import UserError

QUICK, FULL = "quick", "full"


@dataclasses.dataclass(frozen=True)
class Checked:
    """What checking a claim gave. said: its finding, with the numbers. error: the traceback of a check that raised.

    caveats: what the check warned of, such as a best learning rate at an end of its range.
    ran: whether any check was run at this depth; trained: whether the one that trains was.
    """

    claim: Claim
    numbers: tuple[Number, ...]
    curves: tuple[Curves, ...]
    said: tuple[Words, ...]
    caveats: tuple[Words, ...]
    error: str
    seconds: float
    ran: bool
    trained: bool

    @property
    def passed(self) -> bool | None:
        """None: nothing was judged, as no code can, or as only --depth=full does.

        Arithmetic alone does not make an empirical claim pass whose experiment was not run, or is none of ours.
        """
        if self.error:
            return False
        judged = [number.holds for number in self.numbers if number.holds is not None]
        if not judged:
            return False if self.ran else None
        waits = self.claim.verdict is Verdict.EMPIRICAL and not self.trained
        return None if all(judged) and waits else all(judged)

    @property
    def status(self) -> str:
        """passed, failed, broken, "at full depth" if only training can tell, unverifiable if no code can."""
        if self.error:
            return "broken"
        if self.passed is None:
            return "unverifiable" if self.claim.train is None else "at full depth"
        return "passed" if self.passed else "failed"

    @property
    def headline(self) -> Number | None:
        """The number that stands for the claim: the first that fails, else the first judged."""
        judged = [number for number in self.numbers if number.holds is not None]
        return next((number for number in judged if not number.holds), judged[0] if judged else None)


def check(claim: Claim, depth: str, folder: Path) -> Checked:
    """Run the checks of one claim; what they raise is recorded, never passed on. folder: for what is trained."""
    start, numbers, curves, said, error = time.perf_counter(), [], [], [], ""
    train, steps = claim.train, []
    if claim.measure is not None:
        steps.append((claim.measure, claim.finding))
    if depth == FULL and train is not None:
        steps.append((lambda: train(folder / claim.id), claim.learned if steps else claim.learned or claim.finding))
    with _heard() as caveats:
        try:
            for measure, sentence in steps:
                found = list(measure())
                mine = [one for one in found if isinstance(one, Number)]
                numbers += (
                    mine
                    if measure is claim.measure
                    else [dataclasses.replace(n, name=of_training(n.name)) for n in mine]
                )
                curves += [one for one in found if isinstance(one, Curves)]
                if sentence:
                    said.append(fill(sentence, mine))
        except Exception as raised:  # a check that raises is broken; the others go on
            error = "".join(traceback.format_exception(raised))
    if claim.finding and not steps and claim.train is None:
        said.append(claim.finding)  # of a claim that no code can check: it has no numbers in it
    seconds = time.perf_counter() - start
    trained = depth == FULL and train is not None
    return Checked(
        claim, tuple(numbers), tuple(curves), tuple(said), tuple(caveats), error, seconds, bool(steps), trained
    )


def of_training(name: str) -> str:
    """A name that no number of the quick check has."""
    return name if name.startswith("trained_") else f"trained_{name}"


@contextlib.contextmanager
def _heard() -> Iterator[list[Words]]:
    """Caveats that are warned of inside, each once; other warnings go on as they would."""
    caveats: list[Words] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Caveat)
        yield caveats
    for one in caught:
        if not isinstance(one.message, Caveat):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        elif one.message.words not in caveats:
            caveats.append(one.message.words)


def chosen(chapters: Sequence[Chapter], only: str) -> list[Claim]:
    """The claims that --only names (ids or letters of chapters, parted by commas); all of them for "".

    Raises UserError for an unknown id, with the nearest ones.
    """
    claims = {claim.id: claim for chapter in chapters for claim in chapter.claims}
    if not only:
        return list(claims.values())
    wanted: list[str] = []
    for word in filter(None, (part.strip().upper() for part in only.split(","))):
        of_letter = [id for id in claims if id[0] == word]
        if not of_letter and word not in claims:
            close = difflib.get_close_matches(word, claims, n=3, cutoff=0.3)
            hint = f"; near: {', '.join(close)}" if close else f"; they go from {min(claims)} to {max(claims)}"
            raise UserError(f"--only={only}: no claim {word}{hint}")
        wanted += of_letter or [word]
    if not wanted:
        raise UserError(f"--only={only} names no claim: write ids or letters of chapters, such as B12,D07 or E")
    return [claim for id, claim in claims.items() if id in wanted]


def name_of(function: Callable[..., Any]) -> str:
    """transformer_jax.rope.rotate."""
    return f"{function.__module__}.{function.__qualname__}"


def record(checked: Checked) -> dict[str, Any]:
    """A row of claims.json: the headline number's fields, and all numbers under `numbers`."""
    claim, head = checked.claim, checked.headline
    return {
        "id": claim.id,
        "source": claim.source,
        "claim": claim.says._asdict(),
        "verdict": claim.verdict.value,
        "predicted": None if head is None else _finite(head.predicted),
        "measured": None if head is None else _finite(head.measured),
        "tolerance": None if head is None else _finite(head.tolerance),
        "relation": None if head is None else head.relation.value,
        "dtype": None if head is None else head.dtype,
        "passed": checked.passed,
        "status": checked.status,
        "seconds": round(checked.seconds, 3),
        "caveats": [words._asdict() for words in checked.caveats],
        "finding": [words._asdict() for words in checked.said],
        "functions": [name_of(function) for function in claim.uses],
        "numbers": [_number(number) for number in checked.numbers],
        "error": checked.error or None,
    }


def _number(number: Number) -> dict[str, Any]:
    return {
        "name": number.name,
        "label": number.label._asdict(),
        "predicted": _finite(number.predicted),
        "measured": _finite(number.measured),
        "tolerance": _finite(number.tolerance),
        "relation": number.relation.value,
        "dtype": number.dtype,
        "holds": number.holds,
    }


def _finite(x: float | None) -> float | str | None:
    """JSON has no NaN and no infinities: their names."""
    return x if x is None or math.isfinite(x) else str(x)
