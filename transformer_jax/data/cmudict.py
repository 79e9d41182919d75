"""The CMU pronouncing dictionary, from the package eng-to-ipa: words to ARPAbet phones.

Stress digits are dropped: published figures count errors over the 39 phones without them
(Yao & Zweig 2015; Yolchuyeva et al. 2019). A word with several pronunciations is trained on all
of them, and in the held-out parts any of them is right. By a hash of the word 1 of 40 is
"selection" and 4 of 40 are "report", near the shares of the published split, which has its own words.
"""

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from transformer_jax.data.pairs import Pairs
from transformer_jax.errors import DataError

PARTS = 40  # 0: selection; 1 to 4: report
NAME = "CMU dictionary"


def _dictionary() -> bytes:
    """The package's JSON: {word: [pronunciation, …]}. The package itself is not imported: its own imports are slow."""
    found = importlib.util.find_spec("eng_to_ipa")
    places = list(found.submodule_search_locations or ()) if found else []
    if not places:
        raise DataError('task cmudict needs the package eng-to-ipa: pip install "transformer-jax[data]"')
    try:
        return (Path(places[0]) / "resources" / "CMU_dict.json").read_bytes()
    except OSError as error:
        raise DataError(f"task cmudict: the dictionary of eng-to-ipa cannot be read: {error}") from error


def without_stress(pronunciation: str) -> str:
    """ "ah0 b ae1 k" -> "ah b ae k"."""
    return " ".join(phone.rstrip("012") for phone in pronunciation.split())


def cmudict_pairs(place_of: Callable[[str, int], int]) -> tuple[dict[str, Pairs], list[str]]:
    """({split: pairs}, notes). Words are sorted; the pronunciations of a word stand together, each once.

    place_of: (word, parts) -> the part that the word is in. Raises DataError without the package.
    """
    content = _dictionary()
    digest = hashlib.sha256(content).hexdigest()
    words: dict[str, list[str]] = json.loads(content)
    parts: dict[str, tuple[list[str], list[str]]] = {split: ([], []) for split in ("train", "selection", "report")}
    counts, broken = dict.fromkeys(parts, 0), 0
    for word in sorted(words):
        if "\ufffd" in word:
            broken += 1
            continue
        place = place_of(word, PARTS)
        split = "selection" if place == 0 else "report" if place <= 4 else "train"
        counts[split] += 1
        for pronunciation in dict.fromkeys(map(without_stress, words[word])):
            parts[split][0].append(word)
            parts[split][1].append(pronunciation)
    splits = {split: Pairs(f"{NAME}, {split}", *sides, [], digest) for split, sides in parts.items()}
    said = ", ".join(f"{counts[split]:,} words of {split} ({len(part):,} pairs)" for split, part in splits.items())
    skipped = f"; skipped {broken} words whose spelling is damaged" if broken else ""
    return splits, [f"{NAME} without stress: {said}{skipped}"]
