"""What depends on the length of a row depends on its real tokens, and on a packed document's own: RoPE, experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_encoder_decoder import HYPER, SMALL, S, T, batch, logits_of, parameters, tokens
from transformer_jax.batch import Batch
from transformer_jax.encoder_decoder import forward
from transformer_jax.errors import ConfigError
from transformer_jax.rope import lengths_of


@pytest.mark.parametrize("architecture", ["decoder", "encoder", "encoder_decoder"])
def test_a7_f15_dynamic_rope_reads_neither_padding_nor_other_documents(architecture: str) -> None:
    """Past the original context the angles depend on the length: a row's real one, a document's own."""
    stretched = {"rope_scaling": "dynamic", "rope_original_positions": 2}
    config, hyper = SMALL.replace(architecture=architecture, **stretched), HYPER.replace(rope_factor=4.0)
    p, both = parameters(config), architecture == "encoder_decoder"
    b = batch(3, source_BS=tokens(3, S, seed=1)) if both else batch(3)
    lengths, sources = (7, 4, 1), (2, 5, 3)
    padded = b.replace(lengths_B=jnp.array(lengths), source_lengths_B=jnp.array(sources) if both else None)
    got = logits_of(config, p, hyper, padded)
    for row, (t, s) in enumerate(zip(lengths, sources, strict=True)):
        alone = Batch(b.tokens_BT[row : row + 1, :t], b.targets_BT[row : row + 1, :t], jnp.ones((1, t)))
        alone = alone.replace(source_BS=b.source_BS[row : row + 1, :s]) if both else alone
        np.testing.assert_allclose(got[row, :t], logits_of(config, p, hyper, alone)[0], atol=2e-6)
    # Two documents in a row, their ids not in order; the first is in two parts.
    places, ids = jnp.array([[0, 1, 0, 1, 2, 2, 3]]), jnp.array([[9, 9, 4, 4, 4, 9, 9]])
    packed = jax.tree.map(lambda a: a[:1], b).replace(positions_BT=places, segments_BT=ids)
    got = logits_of(config, p, hyper, packed)
    for which in ((0, 1, 5, 6), (2, 3, 4)):
        at = jnp.array(which)
        alone = jax.tree.map(lambda a, at=at: a[:1, at] if a.shape[1] == T else a[:1], b)
        np.testing.assert_allclose(got[0, at], logits_of(config, p, hyper, alone)[0], atol=2e-6)
    # The lengths matter: as long as the whole row, the shorter document turns otherwise.
    assert np.abs(logits_of(config, p, hyper, packed.replace(segments_BT=ids * 0)) - got).max() > 1e-3


def test_packed_documents_share_no_slots_of_experts() -> None:
    config = SMALL.replace(num_experts=2, experts_per_token=1)
    packed = batch(segments_BT=jnp.zeros((2, T), jnp.int32))
    with pytest.raises(ConfigError, match=r"segments with expert_capacity=1.25: .* expert_capacity=0 drops none"):
        jax.eval_shape(lambda p: forward(p, config, HYPER, packed)[0], parameters(config))
    with pytest.raises(ConfigError, match="packing with expert_capacity=1.25"):
        config.replace(packing=True)
    config.replace(packing=True, expert_capacity=0.0)


def test_one_row_of_segments_serves_rows_of_other_lengths() -> None:
    places, ids = jnp.array([[0, 1, 0, 1, 2]]), jnp.array([[7, 7, 3, 3, 3]])
    real = jnp.array([[True] * 5, [True] * 4 + [False]])
    np.testing.assert_array_equal(lengths_of(places, real, ids), [[2, 2, 3, 3, 3], [2, 2, 2, 2, 2]])
    np.testing.assert_array_equal(lengths_of(places, None, jnp.array([[7, 7, 3, 3, 3], [0] * 5]))[1], [3] * 5)


def test_rows_shorter_than_the_window_are_read_as_by_dense_attention() -> None:
    """A batch of short texts is no wider than they are."""
    window = {"mask": "window", "attention_implementation": "banded", "seq_len": 2 * T}
    config, hyper = SMALL.replace(**window, band=T + 1), HYPER.replace(window=T + 1)
    p, b = parameters(config), batch(3)
    dense = config.replace(attention_implementation="dense", band=0)
    np.testing.assert_array_equal(logits_of(config, p, hyper, b), logits_of(dense, p, hyper, b))
    known = jax.jit(lambda p: forward(p, config.replace(band=0), hyper, b)[0])(p)
    np.testing.assert_allclose(known, logits_of(dense, p, hyper, b), atol=2e-6)
