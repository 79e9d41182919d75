"""A mesh changes no number: training on eight devices against one, and where each array is put."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import jit
from transformer_jax import collectives, sharding
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper, with_terms
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.errors import ConfigError
from transformer_jax.layers import UNCONSTRAINED
from transformer_jax.train import TrainState, init_state, train_step

B, T, V = 8, 6, 12
# An epsilon far above round-off: Adam's first steps are signs of gradients, tiny ones too.
QUIET = Hyper(learning_rate=0.01, adam_epsilon=1e-3)
LOUD = QUIET.replace(dropout_rate=0.2, attention_dropout_rate=0.1, clip_norm=0.5)


def small(hyper: Hyper = QUIET, **changes: Any) -> Config:
    sizes = {"vocab_size": V, "d_model": 8, "num_heads": 4, "d_ff": 16, "seq_len": T, "batch_size": B}
    return with_terms(Config(**{**sizes, **changes}), [hyper])


MIXED = {
    "architecture": "encoder_decoder",
    "ffn": "swiglu",
    "tie_embeddings": False,
    "num_experts": 2,
    "loss_chunks": 2,
}
CASES = {
    "grouped, tied, in two parts, clipped, dropout": (small(LOUD, num_kv_heads=2, accumulation=2), LOUD),
    "both stacks, experts, untied": (small(QUIET, optimizer="momentum", **MIXED), QUIET),
}
EIGHT = "data:2,fsdp:2,model:2"
RUNS = [
    *(
        ("grouped, tied, in two parts, clipped, dropout", mesh)
        for mesh in ("data:2,fsdp:2", "model:4", "fsdp:2,model:2,seq:2")
    ),
    *(("both stacks, experts, untied", mesh) for mesh in (EIGHT, "data:2,seq:3")),
]


def make(text: str) -> sharding.Mesh:
    return sharding.make_mesh(sharding.parse_mesh(text))


def rows(config: Config, seed: int = 0) -> Batch:
    """A batch of NumPy rows of unequal lengths, the last one empty."""
    rng = np.random.default_rng(seed)
    tokens, targets = (rng.integers(0, V, (config.batch_size, T)).astype(np.int32) for _ in "ab")
    lengths = np.array([T, 3, T, 1, 5, T, 2, 0])[: config.batch_size]
    batch = Batch(tokens, targets, (np.arange(T)[None] < lengths[:, None]).astype(np.float32), lengths.astype(np.int32))
    if config.architecture == "encoder_decoder":
        return batch.replace(
            source_BS=tokens[::-1].copy(), source_lengths_B=np.maximum(lengths[::-1], 1).astype(np.int32)
        )
    return batch


@functools.cache
def fresh(name: str) -> TrainState:
    config, hyper = CASES[name]
    return jit(lambda hyper: init_state(config, hyper, jax.random.key(3)))(hyper)


def run(name: str, mesh: sharding.Mesh | None, steps: int = 5) -> tuple[TrainState, dict]:
    """A state laid over the mesh, and trained: each step is waited for."""
    (config, hyper), constrain, traces = CASES[name], sharding.constrain(mesh), []

    def advance(state: TrainState, hyper: Hyper, batch: Batch) -> tuple[TrainState, dict]:
        traces.append(1)
        return train_step(config, state, hyper, batch, constrain)

    state, metrics = jax.tree.map(jnp.copy, fresh(name)), {}
    places = None if mesh is None else sharding.shardings(state, mesh)
    state = state if mesh is None else jax.device_put(state, places)
    step = jit(advance, donate_argnums=0, out_shardings=(places, None))
    for seed in range(steps):
        batch = rows(config, seed)
        state, metrics = step(state, hyper, batch if mesh is None else sharding.place_rows(batch, mesh))
        jax.block_until_ready(state)
    assert len(traces) == 1, "types change after the first step"
    return state, metrics


@functools.cache
def alone(name: str) -> tuple[TrainState, dict]:
    return run(name, None)


@pytest.mark.parametrize(("name", "mesh"), RUNS)
def test_five_steps_on_a_mesh_are_those_of_one_device(name: str, mesh: str) -> None:
    (state, metrics), (want, want_metrics) = run(name, make(mesh)), alone(name)
    for part in ("params", "opt_state"):
        chex.assert_trees_all_close(getattr(state, part), getattr(want, part), atol=1e-5, rtol=0)
    chex.assert_trees_all_close(metrics, want_metrics, atol=1e-6, rtol=1e-5)
    assert float(metrics["grad_norm"]) > 0.1


def test_a_state_made_on_a_mesh_is_the_same_and_never_whole_on_a_device() -> None:
    """jit(tx.init) leaves Adam's moments on one device: parameters and moments are made in one program."""
    config, hyper = CASES["grouped, tied, in two parts, clipped, dropout"]
    mesh, want = make(EIGHT), fresh("grouped, tied, in two parts, clipped, dropout")
    places = sharding.shardings(want, mesh)
    made = jit(lambda hyper: init_state(config, hyper, jax.random.key(3)), out_shardings=places)(hyper)
    chex.assert_trees_all_close(made.params, want.params, atol=1e-6, rtol=0)
    D, N, H, K, F, L = config.D, config.N, config.H, config.K, config.F, config.L
    split = V * D + L * (2 * D * N * H + 2 * D * K * H + 2 * D * F)
    whole = L * (4 * D + F + D) + 2 * D  # norms and biases
    for tree, copies in ((made.params, 1), (made.opt_state, 2)):
        counts = 2 * 4 if copies == 2 else 0  # two counters of steps
        for device in mesh.devices.flat:
            shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == device]
            assert sum(s.data.nbytes for s in shards) == copies * 4 * (split // 4 + whole) + counts
    assert sum(row.bytes for row in sharding.placements(made.params, mesh)) == 4 * (split // 4 + whole)


# --- letters -------------------------------------------------------------------------


def test_letters_are_the_end_of_a_name() -> None:
    shapes = jax.eval_shape(lambda: init_transformer(jax.random.key(0), small(num_experts=2, attention_sink=True)))
    found = {
        jax.tree_util.keystr(p[-1:], simple=True): sharding.letters_of(p)
        for p, _ in jax.tree_util.tree_leaves_with_path(shapes)
    }
    assert found["wq_DNH"] == "DNH" and found["w1_EDF"] == "EDF" and found["sink_N"] == "N" and found["scale_D"] == "D"
    state = jax.eval_shape(lambda: init_state(small(), QUIET, jax.random.key(0)))
    rows = {row.path: row for row in sharding.placements(state, make(EIGHT))}
    assert rows["step"].letters == rows["key"].letters == rows["opt_state/0/count"].letters == ""
    for part in ("params", "opt_state/0/mu", "opt_state/0/nu"):
        row = rows[f"{part}/decoder/layers/attention/wq_DNH"]
        assert (row.letters, tuple(row.spec), row.shape) == ("DNH", (None, "fsdp", "model", None), (2, 8, 4, 2))
        assert tuple(rows[f"{part}/decoder/layers/ffn/b1_F"].spec) == ()


@pytest.mark.parametrize(
    ("shape", "letters", "table", "spec", "dropped"),
    [
        ((3, 8, 6, 2), "DNH", sharding.PARAMETERS, (None, "fsdp", None, None), ["N=6 is no multiple of model:4"]),
        ((7, 8), "VD", sharding.PARAMETERS, (None, "fsdp"), ["V=7 is no multiple of model:4"]),
        ((8, 4, 12), "VNF", sharding.PARAMETERS, ("model", None, None), []),  # an axis is used once
        ((8,), "D", sharding.PARAMETERS, (), []),
        ((2, 8), "D", sharding.PARAMETERS, (), []),
        ((12, 5, 8), "BTD", sharding.ACTIVATIONS, (("data", "fsdp"), None, None), []),
        ((2, 5, 8), "BTD", sharding.ACTIVATIONS, ("fsdp", None, None), ["B=2 is no multiple of data:3"]),
        ((3, 5, 8), "BTV", sharding.ACTIVATIONS, ("data", None, "model"), ["B=3 is no multiple of fsdp:2"]),
        ((12,), "B", sharding.ACTIVATIONS, (("data", "fsdp"),), []),
    ],
)  # fmt: skip
def test_each_letter_takes_the_axes_that_divide_it(
    shape: tuple, letters: str, table: sharding.Table, spec: tuple, dropped: list
) -> None:
    found, notes = sharding.spec_of(shape, letters, {"data": 3, "fsdp": 2, "model": 4, "seq": 1}, table)
    assert tuple(found) == spec and [note.split(", ")[0] for note in notes] == dropped


def test_axes_of_one_letter_divide_it_together() -> None:
    found, notes = sharding.spec_of((4, 5), "BT", {"data": 4, "fsdp": 2}, sharding.ACTIVATIONS)
    assert tuple(found) == ("data", None) and notes == ["B=4 is no multiple of fsdp:2"]


def test_j1_what_does_not_divide_is_named() -> None:
    config = small(num_heads=6, head_dim=2, num_kv_heads=3, vocab_size=13, batch_size=9)
    params = jax.eval_shape(lambda: init_transformer(jax.random.key(0), config))
    lines = "\n".join(sharding.dropped(config, params, make("data:2,model:4")))
    for words in ("embed_VD: V=13", "wq_DNH: N=6", "wk_DKH: K=3", "x_BTD: B=9 is no multiple of data:2"):
        assert words in lines
    assert "ffn" not in lines and not sharding.dropped(small(), params, make("fsdp:2"))


MISTAKES = {
    "dta:2": "unknown mesh axis 'dta': did you mean data",
    "data:2,model:2,data:2": "names data twice",
    "data:0": "data is '0', not a whole number of at least 1",
    "data:-2": "data is '-2'",
    "data:two": "data is 'two'",
    "data:2,": "'' is not AXIS:SIZE",
    "data": "'data' is not AXIS:SIZE",
    "data:4,fsdp:3": "--mesh=data:4,fsdp:3 is 12 devices, there are 8 of kind cpu",
}  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES)
def test_a_bad_mesh_is_refused_by_its_values(text: str) -> None:
    with pytest.raises(ConfigError, match=MISTAKES[text]):
        make(text)


def test_axes_keep_their_order_and_what_the_machine_gives() -> None:
    mesh = make("model:2, data:3")
    assert dict(mesh.shape) == {"model": 2, "data": 3} and list(mesh.shape) == ["model", "data"]
    assert [d.id for d in mesh.devices.flat] == list(range(6))
    assert sharding.from_text("") is None and sharding.constrain(None) is UNCONSTRAINED


# --- what the devices say to each other ----------------------------------------------


@functools.cache
def program(mesh: str, constrained: bool = True, **changes: Any) -> str:
    """The compiled training step."""
    config, over = small(QUIET, **changes), make(mesh)
    constrain = sharding.constrain(over) if constrained else UNCONSTRAINED
    state = sharding.abstract(jax.eval_shape(lambda: init_state(config, QUIET, jax.random.key(0))), over)
    batch = sharding.place_rows(rows(config), over)
    places = jax.tree.map(lambda x: x.sharding, state)
    step = jit(lambda state, batch: train_step(config, state, QUIET, batch, constrain), out_shardings=(places, None))
    return step.lower(state, batch).compile().as_text()


def carried(text: str) -> set[str]:
    """Shapes [b, T, D] or [b, T, D/2] of float arrays that the loops of a program carry."""
    return {
        shape for line in text.splitlines() if " while(" in line for shape in re.findall(rf"f32\[\d,{T},[48]\]", line)
    }


def test_activations_have_their_part_of_the_rows_and_collectives_are_the_known_ones() -> None:
    """Without the constraints every layer keeps twice its rows, of half the width, and sums them over fsdp."""
    text = program(EIGHT)
    assert carried(text) == {f"f32[{B // 4},{T},8]"}
    kinds = collectives.totals(collectives.read(text))
    assert set(kinds) == {"all-reduce", "all-gather"}
    assert all(c.bounded for c in collectives.read(text))
    free = program(EIGHT, False)
    assert f"f32[{B // 2},{T},4]" in carried(free)
    assert "all-to-all" in collectives.totals(collectives.read(free))


def test_rows_split_over_devices_are_never_gathered() -> None:
    """Neither by attention, which passes keys round, nor by a product that would make one axis of B and T."""
    text = program("seq:2")
    assert f"f32[{B},{T // 2},8]" in text and f"f32[{B},{T},8]" not in text and f"f32[{B * T},8]" not in text
    assert set(collectives.totals(collectives.read(text))) == {"all-reduce", "collective-permute"}
