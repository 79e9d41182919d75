"""Translate: stdin to stdout, a line in, a line out, in the order of the lines.

    python launch.py --experiment=translate --restore=runs/g2p --beam=5 < words.txt > phones.txt
    python launch.py --experiment=translate --restore=runs/a,runs/b,runs/c --beam=5 < words.txt
    python launch.py --experiment=translate --restore=runs/g2p --average=5 --n_best=3 --beam=5 < words.txt

A blank line gives a blank line, and so does one that is longer than the model's rows; how many there
were, and how many symbols the vocabulary lacks, is said on stderr at the end, and --strict makes
both an error. Lines are UTF-8 with any ending. Answers come as the lines do: those that are there are
translated together, so that a terminal or another program may stay at the other end.
With --n_best=N each line gives N lines: rank, score and text with tabs between; of a blank line the
score and the text are empty, as where the search found fewer. The score is the log-probability after
--penalty and --length_penalty (transformer_jax/beam.py). Line breaks and tabs that a model of bytes
writes become spaces.
Several workdirs are an ensemble, whose probabilities are averaged; they may be of different sizes and kinds,
if their tokenizers are equal. --average=N takes the mean of the parameters of the newest N checkpoints,
a kept best one among them, and says which they are; train with --keep and --checkpoint_every to have them.
--batch_size: lines that are translated at once.
"""

import sys
from collections.abc import Iterator, Sequence

from experiments import ensembles
from experiments.flags import Settings
from experiments.lines import one_line, windows
from experiments.translating import Output, cut, longest_source, translate
from transformer_jax.errors import ConfigError, UserError

FLAGS = ensembles.FLAGS


def run(settings: Settings) -> int:
    """Translate all of stdin."""
    if "metrics" in settings.overrides:
        raise ConfigError("--metrics has no effect in --experiment=translate: leave it out")
    loaded = ensembles.load(settings)
    for note in loaded.notes:
        print(note, file=sys.stderr)
    if sys.stdin is None:
        raise UserError("stdin is closed: a line in, a line out")
    if sys.stdin.isatty():
        print("a line in, a line out; Ctrl-D ends it", file=sys.stderr)
    count = blank = unknown = unended = 0
    too_long: list[int] = []
    # Bytes: what is read and written is UTF-8 whatever the terminal's encoding.
    for lines in windows(sys.stdin.buffer):
        made = translate(loaded.translator, lines, settings.strict, before=count)
        for found in made.outputs:
            for line in _lines(found, settings.n_best):
                sys.stdout.buffer.write(f"{line}\n".encode())
        sys.stdout.buffer.flush()
        too_long += [count + i + 1 for i in made.too_long]
        unended += sum(bool(found) and cut(found[0].ids) for found in made.outputs)
        count, blank, unknown = count + len(lines), blank + made.blank, unknown + made.unknown
    limit = longest_source(loaded.translator)[1]
    print(_summary(count, blank, too_long, unknown, unended, limit), file=sys.stderr)
    return 0


def _lines(found: Sequence[Output], n_best: int) -> Iterator[str]:
    """What stands on stdout for one line: its best output, or `n_best` ranked ones."""
    if n_best == 1:
        yield one_line(found[0].text) if found else ""
        return
    for rank in range(n_best):
        there = rank < len(found)
        yield f"{rank + 1}\t{found[rank].score:.6f}\t{one_line(found[rank].text)}" if there else f"{rank + 1}\t\t"


def _summary(count: int, blank: int, too_long: Sequence[int], unknown: int, unended: int, limit: str) -> str:
    parts = [f"{count:,} line{'' if count == 1 else 's'}"]
    if blank:
        parts.append(f"{blank:,} blank")
    if too_long:
        parts.append(f"{len(too_long):,} longer than {limit}, left blank (the first: line {too_long[0]})")
    if unknown:
        parts.append(f"{unknown:,} symbols outside the vocabulary")
    if unended:
        parts.append(f"{unended:,} output{'' if unended == 1 else 's'} cut off without an end")
    return ", ".join(parts)
