"""Config.matmul_precision is that of every product of a model, however the model is used."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from transformer_jax import sharding
from transformer_jax.batch import Batch
from transformer_jax.cache import extend, init_cache, read_source
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import encode, forward, init_transformer, logits_of
from transformer_jax.train import evaluate_mixture, gradients, token_sums

HYPER = Hyper()
IDS = jnp.arange(12, dtype=jnp.int32).reshape(2, 6) % 7
BATCH = Batch(IDS, IDS, jnp.ones(IDS.shape), source_BS=IDS)


@pytest.fixture(autouse=True, params=[None, "bfloat16"])
def outside(request: Any) -> Iterator[None]:
    """What is set around the model: nothing, or another precision."""
    before = jax.config.jax_default_matmul_precision  # pyright: ignore
    jax.config.update("jax_default_matmul_precision", request.param)
    yield
    jax.config.update("jax_default_matmul_precision", before)


def model(precision: str, architecture: str = "encoder_decoder", **changes: Any) -> tuple[Any, Config]:
    changes |= {"architecture": architecture, "matmul_precision": precision}
    config = Config(vocab_size=7, d_model=8, num_heads=2, seq_len=6, **changes)
    return init_transformer(jax.random.key(0), config), config


def precisions(f: Callable[..., Any], *args: Any) -> set[Any]:
    """The precision of each dot_general that f(*args) traces, those of inner programs included."""
    found = set()

    def look(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.update(eqn.params["precision"] or (None,))
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                    look(inner)

    look(jax.make_jaxpr(f)(*args).jaxpr)
    return found


def uses(config: Config) -> dict[str, Callable[[Any], Any]]:
    """What a model is used for, each from its parameters."""

    def written(params: Any) -> Any:
        cache = read_source(params, config, HYPER, init_cache(config, 2, 6), IDS)
        return extend(params, config, HYPER, cache, IDS)[0]

    return {
        "forward": lambda params: forward(params, config, HYPER, BATCH)[0],
        "encode": lambda params: encode(params, config, HYPER, IDS)[0],
        "logits_of": lambda params: logits_of(params, config, HYPER, jnp.ones((2, 6, 8))),
        "extend": written,
        "token_sums": lambda params: token_sums(params, config, HYPER, BATCH),
        "gradients": lambda params: gradients(params, config, HYPER, BATCH)[0],
        "mixture": lambda params: evaluate_mixture([(config, HYPER, params)], lambda i: BATCH, 1),
    }


@pytest.mark.parametrize("use", ["forward", "encode", "logits_of", "extend", "token_sums", "gradients", "mixture"])
@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_a_models_products_have_the_precision_of_its_config(use: str, precision: str) -> None:
    params, config = model(precision)
    assert precisions(uses(config)[use], params) == {jax.lax.Precision(precision)}


def test_so_have_the_backward_passes_of_a_ring() -> None:
    """A custom rule is traced by jax.grad, once the model is done."""
    mesh = sharding.make_mesh(sharding.parse_mesh("seq:2"))
    params, config = model("high", "decoder", attention_implementation="blockwise")
    constrain = sharding.constrain(mesh)
    found = precisions(lambda params: gradients(params, config, HYPER, BATCH, constrain=constrain)[0], params)
    assert found == {jax.lax.Precision.HIGH}
