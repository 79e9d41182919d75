"""Tasks whose data lives on the device: a batch is a pure function of (config, data, key).

    task = make_task(Config(task="copy"))
    batch = jax.jit(task.train_batch)(task.data, jax.random.key(0))

    text.py    a file, or the text that ships with Python: bytes or tokens; packing.py: several in a row
    tasks.py   `Task`; copy, reverse, induction, recall, modular: made from a key
    markov.py  Markov chains whose entropy rate is known exactly
    pairs.py       pairs of texts from files; cmudict.py: from a dictionary
    tokenizers.py  text to ids and back; subwords.py: with the package tokenizers;
                   vocabularies.py: of both sides, chosen and fitted
    rows.py        rows of many lengths, and their layout
    pairs_task.py  the tasks on pairs, with their tokenizers
    batches.py     pairs in batches of a few shapes, made on the host

A batch depends on the data fields, architecture, vocab_size, seq_len and batch_size of its
Config and on its key, and on nothing else: arms that differ in the model see the same batches.
"""

from transformer_jax.config import Config
from transformer_jax.data.markov import markov_task
from transformer_jax.data.pairs_task import PAIR_TASKS, check_architecture, evaluation_task, make_pairs_task, pair_sizes
from transformer_jax.data.tasks import (
    END,
    PAD,
    SPLITS,
    START,
    Task,
    check_ids,
    copy_task,
    induction_task,
    modular_task,
    prompt_and_reference,
    recall_task,
)
from transformer_jax.data.text import text_task, text_tokenizers
from transformer_jax.data.vocabularies import Tokenizers
from transformer_jax.errors import DataError

__all__ = [
    "END",
    "OWN_VOCABULARY",
    "PAD",
    "SPLITS",
    "START",
    "Task",
    "Tokenizers",
    "check_ids",
    "evaluation_task",
    "make_task",
    "prompt_and_reference",
    "resolve",
]

# V where Config leaves it to the task. Modular: 4 signs and p = 23.
OWN_VOCABULARY = {
    "text": 256,
    "copy": 32,
    "reverse": 32,
    "induction": 32,
    "recall": 32,
    "markov": 16,
    "modular": 32,
}
_MAKERS = {
    "copy": copy_task,
    "reverse": copy_task,
    "induction": induction_task,
    "recall": recall_task,
    "markov": markov_task,
    "modular": modular_task,
}


def resolve(config: Config, strict: bool = False, tokenizers: Tokenizers | None = None) -> Config:
    """`config` with vocab_size filled from the task where it is 0; touches no device.

    Pairs: source_vocab_size too. Where there are tokenizers, the files are read and they are fitted, once
    for all calls as long as the files stay what they are; tokenizers, strict: as in `make_task`. Other tasks read
    nothing.
    """
    if config.vocab_size:
        return config
    if tokenizers is not None:
        if config.task in PAIR_TASKS:
            check_architecture(config, tokenizers)
        return config.replace(vocab_size=tokenizers.vocab_size, source_vocab_size=tokenizers.source_vocab_size)
    if config.task in PAIR_TASKS:
        return config.replace(**pair_sizes(config, strict))
    made = text_tokenizers(config) if config.task == "text" else None
    return config.replace(vocab_size=made.vocab_size if made else OWN_VOCABULARY[config.task])


def make_task(config: Config, tokenizers: Tokenizers | None = None, strict: bool = False) -> Task:
    """The task of `config` with its data on the device.

    tokenizers: of a trained model on pairs or text; None: fitted to the training side. strict: a
    line that holds no pair, or one that does not fit, is an error. Raises DataError, in one line that
    names the values, for data that cannot be read or is too short, and for a seq_len, vocab_size or
    architecture that the task cannot have.
    """
    config = resolve(config, strict, tokenizers)
    if config.task in PAIR_TASKS:
        return make_pairs_task(config, tokenizers, strict)
    if config.task == "text" and not strict:
        return text_task(config, tokenizers)
    if tokenizers is not None or strict:
        raise DataError(f"task {config.task} has no pairs: neither tokenizers nor strict apply")
    return _MAKERS[config.task](config)
