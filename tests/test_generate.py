"""What `generate` and `stream` write: a row knows nothing of its batch, its padding or the cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_decode import HYPER, PROMPTS, SMALL, TEXT, V, batch_of, close, every_way, forward_of, ids, parameters
from transformer_jax import decode
from transformer_jax.decode import bucket, generate, padded, stream
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.samplers import GREEDY, Sampler

pytestmark = pytest.mark.usefixtures("quick_decoding")


def alone(prompt: list[int], **options: Any) -> np.ndarray:
    return np.asarray(generate(parameters(TEXT), TEXT, HYPER, [prompt], jax.random.key(0), **options).ids_BT)[0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b6_b8_a_row_of_a_padded_batch_is_as_alone(side: str, temperature: float) -> None:
    sampler, key = Sampler(temperature=temperature, repetition_penalty=4.0), jax.random.key(0)
    asked, room = decode._request(TEXT, HYPER, PROMPTS, key, max_new_tokens=9, sampler=sampler)
    tokens, real = padded(PROMPTS, asked.given.tokens_BT.shape[1], side)
    asked = dataclasses.replace(asked, given=decode.Given(jnp.asarray(tokens + 9 * ~real), jnp.asarray(real)))
    made = decode._write(parameters(TEXT), TEXT, decode.on_device(HYPER), asked, room)
    for b, prompt in enumerate(PROMPTS):
        want = alone(prompt, max_new_tokens=9, sampler=sampler, row_ids=[b])
        np.testing.assert_array_equal(made.ids_BT[b, :9], want)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_b11_prompts_of_any_length_where_the_heads_are_not_the_width(length: int) -> None:
    prompt = ids(length).tolist()
    assert TEXT.N * TEXT.H != TEXT.D
    made = alone(prompt, max_new_tokens=5, sampler=GREEDY)
    logits = forward_of(TEXT, jnp.asarray([[*prompt, *made]]))
    np.testing.assert_array_equal(jnp.argmax(logits[0, length - 1 : -1], axis=-1), made)


def test_k1_a_program_for_a_bucket_of_lengths() -> None:
    params, key = parameters(TEXT), jax.random.key(0)
    before, sizes = decode._write._cache_size(), set()
    for length in range(1, 65):
        prompt = [length % V] * length
        generate(params, TEXT, HYPER, [prompt, prompt], key, max_new_tokens=1 + length % 7, sampler=Sampler(top_k=3))
        sizes.add(bucket(length))
    assert sizes == {16, 32, 64}
    assert decode._write._cache_size() - before <= len(sizes)


def test_m1_finished_rows_are_pads_with_a_fixed_score_and_the_loop_ends_with_the_last() -> None:
    params, key, prompts = parameters(TEXT), jax.random.key(5), [[3], [4]]
    free = generate(params, TEXT, HYPER, prompts, key, max_new_tokens=9)
    stops = (int(free.ids_BT[0, 0]), int(free.ids_BT[1, 4]))
    assert not set(stops) & set(np.asarray(free.ids_BT)[1, :4].tolist())
    made = generate(params, TEXT, HYPER, prompts, key, max_new_tokens=9, stop_ids=stops, pad_id=7)
    assert made.lengths_B.tolist() == [1, 5]
    for b, length in enumerate((1, 5)):
        np.testing.assert_array_equal(made.ids_BT[b, :length], free.ids_BT[b, :length])
        assert (made.ids_BT[b, length:] == 7).all()
        for name in ("logp_BT", "sampler_logp_BT"):
            np.testing.assert_array_equal(getattr(made, name)[b, :length], getattr(free, name)[b, :length])
            assert (getattr(made, name)[b, length:] == 0).all()
    columns = list(stream(params, TEXT, HYPER, prompts, key, max_new_tokens=9, stop_ids=stops, pad_id=7))
    assert len(columns) == 5
    np.testing.assert_array_equal(np.stack(columns, axis=1), made.ids_BT[:, :5])


def test_probabilities_are_those_of_the_forward_pass() -> None:
    sampler = Sampler(temperature=0.5)
    made = generate(parameters(TEXT), TEXT, HYPER, [[3, 1]], jax.random.key(1), max_new_tokens=6, sampler=sampler)
    assert made.lengths_B.tolist() == [6] and made.ids_BT.shape == made.logp_BT.shape == (1, 6)
    text = jnp.asarray([[3, 1, *np.asarray(made.ids_BT)[0]]])
    logits = np.float64(forward_of(TEXT, text))[0, 1:-1]
    for got, scale in ((made.logp_BT, 1.0), (made.sampler_logp_BT, 0.5)):
        logp = logits / scale - np.log(np.exp(logits / scale).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(got[0], logp[np.arange(6), text[0, 2:]], atol=1e-5)


def test_seeds_reproduce_and_differ() -> None:
    def texts(seed: int) -> list:
        options: Any = {"max_new_tokens": 9}
        return generate(parameters(TEXT), TEXT, HYPER, [[3], [3]], jax.random.key(seed), **options).ids_BT.tolist()

    assert texts(0) == texts(0) != texts(1)
    assert texts(0)[0] != texts(0)[1]  # equal prompts in two rows are two draws


def test_logits_that_are_not_finite_are_refused_where_they_begin() -> None:
    config = TEXT.replace(tie_embeddings=False, num_layers=1)
    params, key, prompts = parameters(config), jax.random.key(4), [[3], [4]]
    made = generate(params, config, HYPER, prompts, key, max_new_tokens=9)
    bad = int(made.ids_BT[1, 2])  # the id whose reading gives NaN; where it is drawn last, nobody reads it
    step, row = next((t, b) for t in range(8) for b in range(2) if made.ids_BT[b, t] == bad)
    embedding = dataclasses.replace(params.embedding, embed_VD=params.embedding.embed_VD.at[bad].set(jnp.nan))
    params = dataclasses.replace(params, embedding=embedding)
    assert bad not in (3, 4)
    message = f"logits are not finite at new token {step + 1} of row {row}"
    with pytest.raises(ConfigError, match=message):
        generate(params, config, HYPER, prompts, key, max_new_tokens=9)
    columns = stream(params, config, HYPER, prompts, key, max_new_tokens=9)
    for t in range(step + 1):
        np.testing.assert_array_equal(next(columns), made.ids_BT[:, t])
    with pytest.raises(ConfigError, match=message):
        next(columns)
    # What comes after a row's end is not read.
    stopped = generate(params, config, HYPER, prompts, key, max_new_tokens=9, stop_ids=(bad,))
    assert (stopped.ids_BT[row, : step + 1] == made.ids_BT[row, : step + 1]).all()


def test_a_batch_of_other_rows_in_another_order_changes_no_row() -> None:
    key = jax.random.key(2)
    options: Any = {"max_new_tokens": 8, "stop_ids": (2,)}
    sampler = Sampler(temperature=jnp.asarray([0.0, 0.7, 1.0]), top_k=jnp.asarray([0, 3, 0]))
    params = parameters(TEXT)
    made = generate(params, TEXT, HYPER, PROMPTS, key, sampler=sampler, **options)
    order = [2, 0]
    some = generate(
        params, TEXT, HYPER, [PROMPTS[b] for b in order], key, row_ids=order,
        sampler=jax.tree.map(lambda x: x[np.asarray(order)], sampler.of_rows(3)), **options,
    )  # fmt: skip
    np.testing.assert_array_equal(some.ids_BT, made.ids_BT[np.asarray(order)])


def test_prompts_in_pieces_and_a_ring_give_the_same_ids() -> None:
    config = TEXT.replace(mask="window", positions="rope")
    params, prompts, key = parameters(config), [[*range(11)] * 3, [4]], jax.random.key(0)
    whole = generate(params, config, HYPER, prompts, key, max_new_tokens=30)
    _, room = decode._request(config, HYPER, prompts, key, max_new_tokens=30, piece=5)
    assert room.ring and room.slots == 3 + 5 - 1
    cut = generate(params, config, HYPER, prompts, key, max_new_tokens=30, piece=5)
    np.testing.assert_array_equal(cut.ids_BT, whole.ids_BT)


def test_l8_a_banned_id_is_never_drawn() -> None:
    """Rows that a vocabulary was enlarged by, say; the probabilities that are told are the model's own."""
    banned, prompts = (0, 3, 10), [[1 + b % 2] for b in range(64)]
    options: Any = {"max_new_tokens": 9, "sampler": Sampler(temperature=3.0, repetition_penalty=2.0)}
    free = generate(parameters(TEXT), TEXT, HYPER, prompts, jax.random.key(0), **options)
    assert set(banned) <= set(np.asarray(free.ids_BT).ravel().tolist())
    made = generate(parameters(TEXT), TEXT, HYPER, prompts, jax.random.key(0), banned_ids=banned, **options)
    assert set(np.asarray(made.ids_BT).ravel().tolist()) == set(range(V)) - set(banned)
    ids = np.asarray(made.ids_BT)[0]
    logp = np.asarray(jax.nn.log_softmax(forward_of(TEXT, jnp.asarray([[*prompts[0], *ids]]))[0]))
    np.testing.assert_allclose(made.logp_BT[0], logp[range(9), ids], atol=1e-5)


def test_translations_are_as_alone_and_as_without_a_cache() -> None:
    """Also where the encoder's angles follow the length: that of the source, not of its bucket."""
    config = SMALL.replace(architecture="encoder_decoder", rope_scaling="dynamic", rope_original_positions=6)
    config = config.replace(source_vocab_size=V + 3)
    params, sources = parameters(config), [[3, 4, 5, 6, 7, 8, V + 2], [V]]
    options: Any = {"max_new_tokens": 5, "sampler": GREEDY, "stop_ids": (0,)}
    made = generate(params, config, HYPER, [[1], [1]], jax.random.key(0), sources=sources, **options)
    for b, source in enumerate(sources):
        text = jnp.asarray([[1, *np.asarray(made.ids_BT)[b]]])
        logp = jax.nn.log_softmax(forward_of(config, text, source_BS=jnp.asarray([source]))[0, :-1], axis=-1)
        length = int(made.lengths_B[b])
        np.testing.assert_array_equal(jnp.argmax(logp, axis=-1)[:length], made.ids_BT[b, :length])
        np.testing.assert_allclose(jnp.max(logp, axis=-1)[:length], made.logp_BT[b, :length], atol=1e-5)


def test_experts_drop_no_token_in_decoding() -> None:
    config = SMALL.replace(num_experts=3, expert_capacity=0.3)
    made = every_way(config, parameters(config), HYPER, batch_of(config), (5,))
    want = every_way(config.replace(expert_capacity=0.0), parameters(config), HYPER, batch_of(config), ())
    close(made["5"][0], want["forward"][0])
    assert np.abs(made["forward"] - want["forward"]).max() > 0.01


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask=none lets a position see later ones": ({"mask": "none"}, {}),
    "mask=inverted lets a position see later ones": ({"mask": "inverted"}, {}),
    "attention_implementation=linear reads sums": ({"attention_implementation": "linear"}, {}),
    "architecture=encoder has no decoder": ({"architecture": "encoder"}, {}),
    "22 positions are past rope_original_positions=20": (
        {"rope_scaling": "dynamic", "rope_original_positions": 20}, {"max_new_tokens": 20}),
    "prefix=3 with 2 prompt tokens": ({"mask": "prefix"}, {}),
    "architecture=decoder has no sources": ({}, {"sources": [[1]]}),
    "architecture=encoder_decoder needs sources": ({"architecture": "encoder_decoder"}, {}),
    "2 sources for 1 prompts": ({"architecture": "encoder_decoder"}, {"sources": [[1], [2]]}),
    "source 0 is empty": ({"architecture": "encoder_decoder"}, {"sources": [[]]}),
    "id 5 at 1 is outside the vocabulary of 5": (
        {"architecture": "encoder_decoder", "source_vocab_size": 5}, {"sources": [[1, 5]]}),
    "max_new_tokens=0 is out of range": ({}, {"max_new_tokens": 0}),
    "piece=-3 is out of range: at least 0": ({}, {"piece": -3}),
    "prompt 0 is empty": ({}, {"prompts": [[]]}),
    "no prompts": ({}, {"prompts": []}),
    "id 11 at 1 is outside the vocabulary of 11": ({}, {"prompts": [[0, 11]]}),
    "id 12 at 0 is outside": ({}, {"stop_ids": (12,)}),
    "id -1 at 0 is outside": ({}, {"pad_id": -1}),
    "id 13 at 0 is outside": ({}, {"banned_ids": (13,)}),
    "2 row_ids for 1 prompts": ({}, {"row_ids": [0, 1]}),
    "top_k=12 is out of range": ({}, {"sampler": Sampler(top_k=12)}),
}  # fmt: skip


@pytest.mark.parametrize("message", MISTAKES)
def test_what_cannot_be_done_is_refused_in_one_line(message: str) -> None:
    changes, options = MISTAKES[message]
    config = SMALL.replace(**changes)
    options = {"prompts": [[1, 2]], "max_new_tokens": 4} | options
    with pytest.raises((ConfigError, DataError)) as error:
        stream(None, config, HYPER, options.pop("prompts"), jax.random.key(0), **options)  # pyright: ignore
    assert message in str(error.value) and "\n" not in str(error.value)
