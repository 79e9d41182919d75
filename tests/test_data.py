"""Tasks: what a batch holds, what its best loss is, and what is refused."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batch import Batch
from transformer_jax.config import TASKS, Config
from transformer_jax.data import (
    END,
    OWN_VOCABULARY,
    PAD,
    SPLITS,
    START,
    Task,
    check_ids,
    make_task,
    prompt_and_reference,
    resolve,
)
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.data.tasks import EQUALS, EVALUATION_SEED, FIRST_SYMBOL, join, largest_prime
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.keys import named

GENERATED = tuple(t for t in TASKS if t not in ("text", *PAIR_TASKS))
RULES = ("copy", "reverse", "induction", "recall", "modular")
LAYOUTS = [("markov", "decoder")] + [(t, a) for t in RULES for a in ("decoder", "encoder", "encoder_decoder")]
ALL = [("text", "decoder"), *LAYOUTS]
# Compiling random bits takes most of this file's time; LLVM's optimiser changes no integer.
QUICK = {"xla_backend_optimization_level": 0}
KEYS = 1000


def small(task: str, architecture: str = "decoder", **changes) -> Config:
    """A Config of prime sizes, its vocabulary filled in."""
    return resolve(Config(**{"task": task, "architecture": architecture, "seq_len": 23, "batch_size": 5} | changes))


@functools.cache
def sampler(task: Task):
    return jax.jit(jax.vmap(task.train_batch, in_axes=(None, 0)), compiler_options=QUICK)


@functools.cache
def some_keys(seed: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), KEYS)


cached_task = functools.cache(make_task)


@functools.cache
def many(task: Task | Config, seed: int = 1) -> Batch:
    """Training batches of 1000 keys, stacked on a leading axis, as numpy."""
    task = cached_task(task) if isinstance(task, Config) else task
    return jax.tree.map(np.asarray, sampler(task)(task.data, some_keys(seed)))


@functools.cache
def evaluation(task: Task | Config, split: str) -> Batch:
    """All evaluation batches of a split, one under the other: [batches * B, …]."""
    task = cached_task(task) if isinstance(task, Config) else task
    count = task.eval_batches[split]
    every = jax.jit(jax.vmap(lambda d, i: task.eval_batch(d, split, i), (None, 0)), compiler_options=QUICK)
    return jax.tree.map(
        lambda x: np.asarray(x).reshape(count * x.shape[1], *x.shape[2:]), every(task.data, jnp.arange(count))
    )


def rows(batch, count: int = 24):
    """The first rows of the first batches as dicts of plain lists."""
    flat = {k: v[:count].reshape(-1, *v.shape[2:]) for k, v in vars(batch).items() if v is not None}
    return [{k: v[i].tolist() for k, v in flat.items()} for i in range(len(flat["tokens_BT"]))]


# --- all tasks -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["text", "markov", "reverse"])
def test_same_batch_however_it_is_called(name):
    """Plain, jit, vmap, lax.map and scan agree bit for bit, optimised or not."""
    config = small(name)
    task = cached_task(config)
    three = some_keys(1)[:3]

    def scanned(data, keys):
        return jax.lax.scan(lambda carry, key: (carry, task.train_batch(data, key)), 0, keys)[1]

    want = jax.tree.map(lambda *x: np.stack(x), *[task.train_batch(task.data, k) for k in three])
    single, sampled = jax.jit(task.train_batch, compiler_options=QUICK), many(config)
    ways = {
        "jit": jax.tree.map(lambda *x: np.stack(x), *[single(task.data, k) for k in three]),
        "vmap": jax.tree.map(lambda x: x[:3], sampled),
        "map": jax.jit(lambda d, ks: jax.lax.map(lambda k: task.train_batch(d, k), ks))(task.data, three),
        "scan": jax.jit(scanned, compiler_options=QUICK)(task.data, three),
    }
    for way, got in ways.items():
        assert jax.tree.structure(got) == jax.tree.structure(want), way
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.array_equal(want.tokens_BT[0], want.tokens_BT[1])
    one = jax.jit(task.eval_batch, static_argnums=1, compiler_options=QUICK)(task.data, "report", 2)
    every = jax.tree.map(lambda x: x[10:15], evaluation(config, "report"))
    jax.tree.map(np.testing.assert_array_equal, one, every)


@pytest.mark.parametrize("name,architecture", ALL)
def test_the_model_plays_no_part(name, architecture):
    """Arms with other sizes, numbers of steps or optimisers draw their batches by the same program."""
    config = small(name, architecture)
    other = config.replace(d_model=24, num_layers=7, steps=3, optimizer="sgd", mask="none", terms=("dropout",))
    programs = [str(jax.make_jaxpr(t.train_batch)(t.data, some_keys(1)[0])) for t in map(cached_task, (config, other))]
    assert programs[0] == programs[1] and "random_bits" in programs[0]


@pytest.mark.parametrize("name,architecture", ALL)
def test_shapes_types_and_ids_in_range(name, architecture):
    config = small(name, architecture)
    task = cached_task(config)
    B, T = config.batch_size, config.seq_len
    assert task.name == name and task.vocab_size == OWN_VOCABULARY[name] == resolve(config).vocab_size
    sampled = many(config)
    assert sampled.tokens_BT.shape == sampled.targets_BT.shape == sampled.weights_BT.shape == (KEYS, B, T)
    for batch in (sampled, evaluation(config, "selection")) if architecture == "decoder" else (sampled,):
        assert batch.tokens_BT.dtype == batch.targets_BT.dtype == np.int32 and batch.weights_BT.dtype == np.float32
        check_ids(batch.tokens_BT, task.vocab_size)
        check_ids(batch.targets_BT, task.vocab_size)
        assert (batch.weights_BT.sum(-1) > 0).all() or name == "text"
        assert (batch.source_BS is not None) == (architecture == "encoder_decoder")
        if batch.source_BS is not None:
            check_ids(batch.source_BS, task.vocab_size)
            place = np.arange(T) >= batch.source_lengths_B[..., None]
            assert batch.source_lengths_B.dtype == np.int32 and (batch.source_BS[place] == PAD).all()
        if batch.lengths_B is not None:
            place = np.arange(T) >= batch.lengths_B[..., None]
            assert batch.lengths_B.dtype == np.int32 and batch.lengths_B.max() <= T
            assert (batch.tokens_BT[place] == PAD).all() and (batch.weights_BT[place] == 0).all()


@pytest.mark.parametrize("name", GENERATED)
def test_evaluation_batches_are_fixed_and_apart(name):
    """No row is shared between selection, report and training, whatever key a run starts from."""
    config = small(name)
    task = cached_task(config)
    assert task.eval_batches == {"selection": 16, "report": 16} and task.sha256 == ""
    seen = {split: {tuple(r) for r in evaluation(config, split).tokens_BT.tolist()} for split in SPLITS}
    assert len(seen["report"] | seen["selection"]) == 2 * 16 * 5
    root = jax.random.key(EVALUATION_SEED)
    tried = [root, *[jax.random.fold_in(named(root, f"evaluation batch of {s}"), i) for s in SPLITS for i in range(16)]]
    tried = jnp.concatenate([jnp.stack(tried), some_keys(1)[len(tried) :]])
    train = np.asarray(sampler(task)(task.data, tried).tokens_BT).reshape(-1, config.seq_len)
    assert not {tuple(r) for r in train.tolist()} & (seen["report"] | seen["selection"])


def test_evaluation_batches_are_the_same_on_every_machine():
    """Fixed sets must not drift with jax's version or device: results are compared on them."""
    crc = {t: zlib.crc32(evaluation(small(t), "report").tokens_BT.tobytes()) for t in GENERATED}
    assert crc == {
        "copy": 2846483233,
        "reverse": 2688153702,
        "induction": 2757317128,
        "recall": 3503279025,
        "markov": 3932649087,
        "modular": 768761410,
    }


def test_unknown_split_and_batch():
    task = make_task(small("copy"))
    with pytest.raises(ConfigError, match="'reports': did you mean report"):
        task.eval_batch(task.data, "reports", 0)
    for index in (-1, 16):
        with pytest.raises(DataError, match=f"batch {index} of report: it has 16"):
            task.eval_batch(task.data, "report", index)


# --- rules, re-implemented on plain lists --------------------------------------


def first_successor(ids: list[int], symbol: int) -> int:
    return ids[ids.index(symbol) + 1]


def add(a: int, b: int, vocab_size: int) -> int:
    """Modular addition on ids, with the prime found by a sieve."""
    numbers = vocab_size - 4
    prime = max(p for p in range(2, numbers + 1) if not any(p % d == 0 for d in range(2, p)))
    return (a - 4 + b - 4) % prime + 4


def answers(task: str, x: list[int], vocab_size: int) -> list[int]:
    """What an encoder-decoder must answer to a source."""
    if task == "copy":
        return x
    if task == "reverse":
        return x[::-1]
    if task == "modular":
        assert x[2::3] == [EQUALS] * (len(x) // 3)
        return [add(a, b, vocab_size) for a, b in zip(x[::3], x[1::3], strict=False)]
    step = 1 if task == "induction" else 2
    context = next(i for i in range(0, len(x), step) if x[i] in x[:i:step])
    return [first_successor(x[:context], q) for q in x[context:]]


def decoder_says(task: str, seen: list[int], vocab_size: int) -> int | None:
    """The next id after `seen`, None where it does not count."""
    last = seen[-1]
    if task in ("copy", "reverse"):
        if START not in seen or END in seen:
            return None
        x, said = seen[: seen.index(START)], len(seen) - seen.index(START) - 1
        return [*answers(task, x, vocab_size), END][said]
    if task == "induction":
        return first_successor(seen, last) if last in seen[:-1] else None
    if task == "recall":
        key = len(seen) % 2 == 1 and last in seen[:-1]
        return first_successor(seen, last) if key else None
    return add(seen[-3], seen[-2], vocab_size) if last == EQUALS else None


def encoder_says(task: str, x: list[int], place: int, vocab_size: int) -> int | None:
    if task in ("copy", "reverse"):
        return answers(task, x, vocab_size)[place]
    if task == "modular":
        return add(x[place - 2], x[place - 1], vocab_size) if x[place] == EQUALS else None
    step = 1 if task == "induction" else 2
    context = next(i for i in range(0, len(x), step) if x[i] in x[:i:step])
    return first_successor(x[:context], x[place]) if place >= context else None


TIGHT = {"seq_len": 30, "vocab_size": 9}  # fewer symbols than a row has room for
RULES_AND_SIZES = [(t, a, {}) for t, a in LAYOUTS if t != "markov"] + [
    (t, a, TIGHT) for t, a in LAYOUTS if t != "markov" and (a == "decoder" or t in ("induction", "recall"))
]


@pytest.mark.parametrize("name,architecture,sizes", RULES_AND_SIZES)
def test_rules(name, architecture, sizes):
    """A rule that sees only what a counted position sees names every counted target: the floor is 0."""
    config = small(name, architecture, **sizes)
    T, V = config.seq_len, config.V
    assert cached_task(config).floor == 0.0
    for row in rows(many(config)):
        tokens, length = row["tokens_BT"], row.get("lengths_B", T)
        if architecture == "encoder_decoder":
            x = row["source_BS"][: row["source_lengths_B"]]
            want = [*answers(name, x, V), END]
            # F9: one START, inputs are targets shifted by one, padding weighs nothing.
            assert row["targets_BT"] == want + [PAD] * (T - len(want))
            assert tokens == ([START, *want] + [PAD] * T)[:T] and tokens.count(START) == 1
            assert row["weights_BT"] == [1.0] * len(want) + [0.0] * (T - len(want))
            assert length == min(T, len(want) + 1)
            continue
        if architecture == "encoder":
            says = [encoder_says(name, tokens[:length], t, V) for t in range(length)]
        else:
            says = [decoder_says(name, tokens[: t + 1], V) for t in range(length)]
            assert row["targets_BT"][:-1] == tokens[1:]
        says += [None] * (T - length)
        assert [w > 0 for w in row["weights_BT"]] == [s is not None for s in says]
        assert all(s is None or s == y for s, y in zip(says, row["targets_BT"], strict=True))


def test_rows_by_hand():
    """The layouts as they are documented, on one row each."""
    shown = {}
    for name, architecture in LAYOUTS:
        config = small(name, architecture)
        batch = jax.tree.map(lambda x: x[0], many(config))
        shown[name, architecture] = prompt_and_reference(config, cached_task(config), batch, 1)
    prompt, reference = shown["copy", "decoder"]
    assert prompt.endswith(" >") and reference == prompt.replace(" >", " .")
    prompt, reference = shown["reverse", "encoder_decoder"]
    assert reference == " ".join([*reversed(prompt.split()), "."])
    prompt, reference = shown["reverse", "encoder"]
    assert reference.split() == prompt.split()[::-1]
    a, b, equals = shown["modular", "decoder"][0].split()[-3:]
    assert equals == "=" and int(shown["modular", "decoder"][1]) == (int(a) + int(b)) % 23
    prompt, reference = shown["recall", "decoder"]
    *pairs, key = prompt.split()
    assert reference == pairs[pairs.index(key) + 1] and reference.isdigit() and key.isalpha()
    prompt, reference = shown["induction", "decoder"]
    period = len(set(prompt.split()))
    whole = f"{prompt} {reference}".split()
    assert len(whole) == 24 and all(whole[i] == whole[i % period] for i in range(24))
    prompt, reference = shown["markov", "decoder"]
    assert len(prompt.split()) == 12 and len(reference.split()) == 12


def test_lengths_and_symbols_vary():
    """Every length in the documented range, and every symbol, occurs."""
    copies = many(small("copy"))
    assert set(np.unique(copies.weights_BT.sum(-1) - 1)) == set(range(6, 12))  # room (23 - 1) // 2 = 11
    assert set(np.unique(copies.tokens_BT)) == set(range(32))
    pairs = many(small("reverse", "encoder_decoder"))
    assert set(np.unique(pairs.source_lengths_B)) == set(range(11, 23))
    blocks = many(small("induction"))
    assert set(np.unique(23 - blocks.weights_BT.sum(-1))) == set(range(5, 12))
    recall = many(small("recall"))
    assert set(np.unique(recall.tokens_BT[..., :12:2])) == set(range(3, 18))
    assert set(np.unique(recall.targets_BT[recall.weights_BT == 1])) == set(range(18, 32))


def test_modular_table():
    """All 529 sums of p = 23, each against Python's own arithmetic."""
    batch = many(small("modular"))
    at = np.argwhere(batch.weights_BT == 1)
    table = {}
    for i, b, t in at.tolist():
        x, y, sign = (int(v) - FIRST_SYMBOL - 1 for v in batch.tokens_BT[i, b, t - 2 : t + 1])
        assert sign == -1
        table.setdefault((x, y), set()).add(int(batch.targets_BT[i, b, t]) - FIRST_SYMBOL - 1)
    assert table == {(x, y): {(x + y) % 23} for x in range(23) for y in range(23)}
    assert [largest_prime(n) for n in (2, 3, 4, 10, 28, 97, 100)] == [2, 3, 3, 7, 23, 97, 97]


def test_join():
    one, two = jnp.array([[3, 4, 5], [6, 7, 8]]), jnp.array([[9], [9]])
    row, (in_one, in_two, in_none) = join(6, (one, jnp.array([1, 3])), (two, 1), (jnp.zeros((2, 0), jnp.int32), 0))
    assert row.tolist() == [[3, 9, 0, 0, 0, 0], [6, 7, 8, 9, 0, 0]]
    assert in_one.sum(1).tolist() == [1, 3] and in_two[:, [1, 3]].tolist() == [[True, False], [False, True]]
    assert not in_none.any()


# --- refusals ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,architecture,settings,words",
    [
        ("text", "encoder", {}, ["text", "architecture=decoder", "encoder"]),
        ("markov", "encoder_decoder", {}, ["markov", "architecture=decoder", "encoder_decoder"]),
        ("markov", "decoder", {"vocab_size": 1}, ["markov", "vocab_size", "at least 2", "not 1"]),
        ("copy", "decoder", {"seq_len": 2}, ["copy", "architecture=decoder", "seq_len", "at least 3", "not 2"]),
        ("reverse", "encoder_decoder", {"seq_len": 1}, ["reverse", "seq_len", "at least 2", "not 1"]),
        ("copy", "encoder", {"vocab_size": 4}, ["copy", "vocab_size", "at least 5", "not 4"]),
        ("induction", "decoder", {"seq_len": 3}, ["induction", "seq_len", "at least 4", "not 3"]),
        ("recall", "decoder", {"seq_len": 6}, ["recall", "seq_len", "at least 7", "not 6"]),
        ("recall", "encoder", {"vocab_size": 6}, ["recall", "vocab_size", "at least 7", "not 6"]),
        ("modular", "decoder", {"seq_len": 2}, ["modular", "seq_len", "at least 3", "not 2"]),
        ("modular", "encoder", {"vocab_size": 5}, ["modular", "vocab_size", "at least 6", "not 5"]),
    ],
)
def test_refusals(name, architecture, settings, words):
    with pytest.raises(DataError) as caught:
        make_task(small(name, architecture, **settings))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name,architecture", LAYOUTS)
def test_smallest_sizes(name, architecture):
    """The least sizes that are not refused make whole batches."""
    least = {"copy": 5, "reverse": 5, "induction": 5, "recall": 7, "modular": 6, "markov": 2}[name]
    length = {"induction": 4, "recall": 6, "modular": 3, "markov": 1}.get(name)
    length = length or {"decoder": 3, "encoder": 1, "encoder_decoder": 2}[architecture]
    length += name == "recall" and architecture == "decoder"
    config = small(name, architecture, vocab_size=least, seq_len=length)
    task = make_task(config)
    for row in rows(many(task), 8):
        assert sum(row["weights_BT"]) >= 1 and max(row["tokens_BT"] + row["targets_BT"]) < least
        if name != "markov" and architecture == "decoder":
            says = [decoder_says(name, row["tokens_BT"][: t + 1], least) for t in range(length)]
            assert all(y == s for y, s, w in zip(row["targets_BT"], says, row["weights_BT"], strict=True) if w)
    with pytest.raises(DataError):
        make_task(config.replace(vocab_size=least - 1 or 1))
    if length > 1:
        with pytest.raises(DataError):
            make_task(config.replace(seq_len=length - 1))


def test_check_ids():
    """F17, F10: V, V + 7, -1 and -100 are refused on the host, with their place."""
    check_ids([0, 3], 4)
    check_ids([], 4)
    check_ids(jnp.arange(4), 4)
    for bad in (4, 11, -1, -100):
        with pytest.raises(DataError, match=rf"id {bad} at \(1, 0\) is outside the vocabulary of 4 \(0 to 3\)"):
            check_ids([[0, 1], [bad, 9]], 4)
    with pytest.raises(DataError, match="id 4 at 2 is outside"):
        check_ids([0, 1, 4], 4)
    with pytest.raises(DataError, match="whole numbers, not float"):
        check_ids([0.5], 4)


def test_resolve_keeps_a_given_size():
    assert resolve(Config(task="copy", vocab_size=77)).vocab_size == 77
    assert {t: resolve(Config(task=t)).vocab_size for t in ("text", *GENERATED)} == OWN_VOCABULARY
    assert resolve(Config(text="/nowhere")).vocab_size == 256  # reads nothing
