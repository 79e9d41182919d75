"""Tasks whose data lives on the device: a batch is a pure function of (config, data, key).

    task = make_task(Config(task="copy"))
    batch = jax.jit(task.train_batch)(task.data, jax.random.key(0))

    text.py    the bytes of a file, or of the text that ships with Python
    tasks.py   `Task`; copy, reverse, induction, recall, modular: made from a key
    markov.py  Markov chains whose entropy rate is known exactly

A batch depends on the task, text, architecture, vocab_size, seq_len and batch_size of its
Config and on its key, and on nothing else: arms that differ in the model see the same batches.
"""

from transformer_jax.config import Config
from transformer_jax.data.markov import markov_task
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
from transformer_jax.data.text import text_task

__all__ = [
    "END",
    "OWN_VOCABULARY",
    "PAD",
    "SPLITS",
    "START",
    "Task",
    "check_ids",
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
    "text": text_task,
    "copy": copy_task,
    "reverse": copy_task,
    "induction": induction_task,
    "recall": recall_task,
    "markov": markov_task,
    "modular": modular_task,
}


def resolve(config: Config) -> Config:
    """`config` with vocab_size filled from the task where it is 0; reads no file, touches no device."""
    return config if config.vocab_size else config.replace(vocab_size=OWN_VOCABULARY[config.task])


def make_task(config: Config) -> Task:
    """The task of `config` with its data on the device.

    Raises DataError, in one line that names the values, for a text that cannot be read or
    is too short, and for a seq_len, vocab_size or architecture that the task cannot have.
    """
    return _MAKERS[config.task](resolve(config))
