"""Write text with a trained model, and see it as it comes.

    python launch.py --experiment=sample --restore=runs/lm --prompt="The " --sample_temperature=0.8 --top_p=0.95
    python launch.py --experiment=sample --restore=runs/copy --prompt="a b c >" --sample_temperature=0

Expected: the prompt and its continuation on stdout, notes on stderr; the same seed writes the same.
A text model is given text. The other tasks are given ids as their samples show them, with spaces
between: names (`a`, `>` for the start of an answer, `.` for its end), or the ids' numbers where no
name is such a number. An encoder-decoder is given its source and writes the answer alone.
The model is the newest good checkpoint's, or that of --restore_step (a step, or best).
What is done with the probabilities, and in which order, is in transformer_jax/samplers.py.
"""

import codecs
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax

from experiments import restoring
from experiments.evaluate import saved_configuration
from experiments.flags import Settings
from transformer_jax.cache import check_cacheable, check_positions
from transformer_jax.config import Config
from transformer_jax.data import END, START, Tokenizers, check_ids, make_task
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.decode import stream
from transformer_jax.errors import ConfigError, unknown
from transformer_jax.samplers import Sampler, check_sampler

FLAGS = (
    "restore", "restore_step", "prompt", "sample_temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "max_new_tokens", "num_samples", "seed", "stop",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Codec:
    """Ids of what a person writes; and, made anew for each text, a function that shows ids as they come.

    The function is given ids, none at the end, and gives what can be shown: no character is ever cut.
    """

    encode: Callable[[str], list[int]]
    shower: Callable[[], Callable[[Sequence[int]], str]]
    stop_ids: tuple[int, ...]


def codec_of(config: Config, tokenizers: Tokenizers | None = None) -> Codec:
    """A text model's tokenizer, or bytes; names for generated tasks. The text that a model learned is not read."""
    if tokenizers is not None:
        tokenizer = tokenizers.target
        return Codec(tokenizer.encode, tokenizer.shower, (END,))
    if config.task == "text":
        return Codec(lambda text: list(text.encode("utf-8", "surrogateescape")), _bytes_shower, ())
    task = make_task(config)
    names = {task.show([i]): i for i in range(config.V)}

    def encode(text: str) -> list[int]:
        ids = []
        for word in text.split():
            if word not in names and not word.lstrip("-").isdecimal():
                raise unknown(f"symbol of task {config.task}", word, names)
            ids.append(names[word] if word in names else int(word))
        return ids

    # A Markov chain has symbols only: none of them ends it.
    stop_ids = () if config.task == "markov" else (END,)
    return Codec(encode, lambda: lambda ids: "".join(f"{task.show([i])} " for i in ids), stop_ids)


def _bytes_shower() -> Callable[[Sequence[int]], str]:
    """UTF-8 as it comes: a character is shown when its last byte is there; what is none is U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    # 0xFF never occurs in UTF-8, so that an id that is no byte is a replacement.
    return lambda ids: decoder.decode(bytes(i if i < 256 else 0xFF for i in ids), final=not ids)


def before_stop(ids: Iterable[int], stop: Sequence[int]) -> Iterator[list[int]]:
    """Ids in lists, up to where `stop` first begins; held back while they may be its beginning."""
    held: list[int] = []
    stop = list(stop)
    for i in ids:
        held.append(i)
        if stop and held[-len(stop) :] == stop:
            yield held[: -len(stop)]
            return
        begun = max((n for n in range(1, len(stop)) if held[-n:] == stop[:n]), default=0)
        yield held[: len(held) - begun]
        held = held[len(held) - begun :]
    yield held


def note(text: str) -> None:
    """A line on stderr: stdout has the text alone."""
    print(text, file=sys.stderr)


def show(text: str) -> None:
    """Write to stdout at once; a terminal that lacks a character shows another."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def run(settings: Settings) -> int:
    """Write --num_samples texts."""
    from experiments import loop

    trained, trained_hyper = saved_configuration(settings.restore)
    if trained.task in PAIR_TASKS:
        raise ConfigError(f"--restore={settings.restore} was trained on pairs: --experiment=translate writes for it")
    config, hyper = restoring.changed(trained, trained_hyper, settings.overrides)
    check_cacheable(config)
    sampler = Sampler(
        settings.sample_temperature, settings.top_k, settings.top_p, settings.min_p, settings.repetition_penalty
    )
    check_sampler(sampler, config.V)
    codec = codec_of(config, restoring.saved_tokenizers(settings.restore))
    given, stop = codec.encode(settings.prompt), codec.encode(settings.stop)
    if config.task == "text" and not given:
        note("no --prompt: the text begins after a line break")
        given = codec.encode("\n")
    prompt, source = _checked(config, given)
    check_ids(stop, config.V)
    count = settings.max_new_tokens or config.seq_len - len(prompt)
    if count < 1:
        raise ConfigError(f"--prompt has all of seq_len={config.seq_len} tokens: give --max_new_tokens")
    total = len(prompt) + count
    check_positions(config, total, f"--prompt of {len(prompt)} and --max_new_tokens={count}")
    saves = Path(settings.restore) / "checkpoints"
    restored = restoring.restore_state(saves, loop.abstract_state(config, hyper), settings.restore_step)
    for line in (*restored.notes, f"{settings.restore}, step {restored.step}"):
        note(line)
    if total > config.seq_len:
        note(f"{total} positions: those past seq_len={config.seq_len} were never trained")
    for number in range(settings.num_samples):
        if settings.num_samples > 1:
            show(f"--- {number + 1} of {settings.num_samples}\n")
        columns = stream(
            restored.state.weights, config, hyper, [prompt], jax.random.key(settings.seed), max_new_tokens=count,
            sampler=sampler, stop_ids=codec.stop_ids, row_ids=[number], sources=None if source is None else [source],
        )  # fmt: skip
        shower = codec.shower()
        if source is None and settings.prompt:
            show(shower(given))
        for ids in before_stop((int(ids_B[0]) for ids_B in columns), stop):
            if ids:
                show(shower(ids))
        show(shower([]) + "\n")
    return 0


def _checked(config: Config, given: list[int]) -> tuple[list[int], list[int] | None]:
    """(what the decoder begins with, the source or None); ConfigError or DataError for a prompt that cannot be."""
    check_ids(given, config.V)
    if len(given) > config.seq_len:
        raise ConfigError(f"--prompt has {len(given)} tokens, and the model reads seq_len={config.seq_len}")
    if not given:
        raise ConfigError(f"--prompt is empty: task {config.task} begins with at least one id")
    return ([START], given) if config.architecture == "encoder_decoder" else (given, None)
