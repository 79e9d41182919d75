"""Sources that leave no room, and the programs that a bucket of sources needs."""

import dataclasses

import jax
import pytest

from experiments import evaluating, translating
from experiments.translating import Translator, translate
from tests.quick import jit
from transformer_jax import beam
from transformer_jax.config import Config, Hyper
from transformer_jax.data import Tokenizers
from transformer_jax.data.tokenizers import Bytes
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.errors import DataError

BASE = Config(
    architecture="decoder", vocab_size=Bytes().size, d_model=8, num_heads=2, num_layers=1, seq_len=14, max_positions=20
)  # fmt: skip
LEARNED = BASE.replace(positions="learned", max_positions=14)
DYNAMIC = BASE.replace(positions="rope", rope_scaling="dynamic", rope_original_positions=10)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam, "_search", jit(beam.search, static_argnames=("beam", "n_best")))


def translator(config: Config, rows: int = 2) -> Translator:
    params = jit(lambda: init_transformer(jax.random.key(3), config))()
    return Translator((params,), config, Hyper(), Tokenizers(Bytes(), Bytes()), rows=rows)


@pytest.mark.parametrize(
    ("config", "longest", "limit"),
    [
        (LEARNED, 12, "14 tokens are longer than max_positions=14 less the one to write"),
        (DYNAMIC, 8, "10 tokens are longer than rope_original_positions=10 less the one to write"),
        (LEARNED.replace(max_positions=15), 13, "15 tokens are longer than seq_len=14"),
        (DYNAMIC.replace(rope_original_positions=40), 13, "15 tokens are longer than seq_len=14"),
    ],
    ids=["learned", "dynamic", "a longer table", "a longer context"],
)
def test_a_source_that_leaves_nothing_to_write_is_a_counted_skip(
    config: Config, longest: int, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte and START stand for each source of `longest` letters; one letter more, and nothing can be written."""
    made = translator(config)
    found = translate(made, ["ab", "x" * longest, "x" * (longest + 1), "abc"])
    assert found.too_long == [2] and [len(outputs) for outputs in found.outputs] == [1, 1, 0, 1]
    assert len(found.outputs[1][0].ids) == 1
    # So an evaluation during training does not end it.
    score = evaluating.judge(made, [("ab", ["b"]), ("x" * (longest + 1), ["x"])])
    assert score(made.models[0])["exact_match"] == 0.0
    monkeypatch.setattr(translating, "beam_search", lambda *a, **o: pytest.fail("a model was asked"))
    with pytest.raises(DataError, match=f"source 2, 'x*': {limit}"):
        translate(made, ["ab", "x" * (longest + 1)], strict=True)


def test_an_encoder_reads_as_many_as_a_row_has() -> None:
    config = LEARNED.replace(architecture="encoder_decoder")
    found = translate(translator(config), ["x" * 13, "x" * 14])
    assert found.too_long == [1] and len(found.outputs[0]) == 1


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder"])
@pytest.mark.parametrize("width", [1, 3])
def test_k1_a_line_alone_has_a_program_and_any_number_of_others_one_more(width: int, architecture: str) -> None:
    config = BASE.replace(architecture=architecture, d_model=12, seq_len=16)
    made = dataclasses.replace(translator(config, rows=5), beam=width)
    before, counts = beam._search._cache_size(), []
    for sources in (["abc"], ["ab"], ["abc", "cab"], ["abc"] * 11, ["ab", "ab", "cab", "abc", "abc"]):
        translate(made, sources)
        counts.append(beam._search._cache_size() - before)
    assert counts == [1, 1, 2, 2, 2]


def test_a_line_alone_is_the_line_among_others() -> None:
    """Another program, and the same ids and scores, in half precision too."""
    config = BASE.replace(architecture="encoder_decoder", compute_dtype="bfloat16")
    made = dataclasses.replace(translator(config, rows=64), beam=3, n_best=3)
    sources = [f"{i:b}" for i in range(40)]
    together = translate(made, sources).outputs
    for i in (0, 7, 39):
        alone = translate(made, [sources[i]]).outputs[0]
        assert [out.ids for out in alone] == [out.ids for out in together[i]]
        assert [out.score for out in alone] == pytest.approx([out.score for out in together[i]], abs=1e-5)
