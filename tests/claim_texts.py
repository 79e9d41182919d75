"""What the ledger's texts print: numbers that are not those that were measured, labels that are not translated."""

import math
import re
from collections.abc import Iterable

from experiments.claims import record

PLACE = re.compile(r"(= |≈ )?(?<!\{)\{(\w+):?([^}]*)\}( =)?")


def misprinted(sentence: str, numbers: Iterable[record.Number]) -> list[str]:
    """Places that print a number as another one: too few digits, or a measured one where "=" promises the formula's."""
    by_name, wrong = {number.name: number for number in numbers}, []
    for before, name, spec, after in PLACE.findall(sentence):
        number = by_name[name]
        text, promised = (f"{{:{spec}}}".format(record._Shown(x or 0.0)) for x in (number.measured, number.predicted))
        x = (1e4 if spec == "万" else 1) * float(text.replace("−", "-").replace(",", "").replace("%", "e-2"))
        # One digit is a third off at most, when 1.5 is printed as 1 or 2.
        if math.isfinite(number.measured) and abs(x - number.measured) > abs(number.measured) / 3:
            wrong.append(f"{name} = {number.measured:g} printed as {text}")
        if (before or after) and number.predicted is not None and text != promised:
            wrong.append(f"{name}: {text}, where the formula has {promised}")
    return wrong


# Words of Chinese texts that are not Chinese: names of things, types and code.
LATIN = {
    "softmax", "entmax", "sigmoid", "argmin", "argmax", "onehot", "diag", "logits", "logit", "float", "bfloat", "FLOPs",
    "RoPE", "ALiBi", "YaRN", "Adam", "ReLU", "GELU", "SiLU", "SwiGLU", "tanh", "relu", "gelu", "silu", "swiglu",
    "LayerNorm", "RMSNorm", "layernorm", "rmsnorm",
}  # fmt: skip


def untranslated(label: str) -> set[str]:
    """English words of four letters and more in a Chinese label."""
    return set(re.findall(r"(?<![A-Za-z_])[A-Za-z]{4,}(?![A-Za-z_])", label)) - LATIN
