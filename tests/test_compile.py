"""--experiment=compile: flags refused in a line; bytes and gathers of a compiled step; a pod where libtpu is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import launch
from experiments.compile import batch_shapes, compile_step, compile_sweep, gathered_whole
from transformer_jax import collectives, sharding, topology
from transformer_jax.config import Config, Hyper
from transformer_jax.data import resolve
from transformer_jax.encoder_decoder import count_parameters
from transformer_jax.errors import ConfigError
from transformer_jax.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
SMALL = Config(vocab_size=32, d_model=16, num_layers=3, num_heads=2, d_ff=24, seq_len=8, batch_size=8)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--topology and --mesh are wanted"),
        (["--topology=v5e:4x4"], "--topology and --mesh are wanted"),
        (["--topology=v5:4x4", "--mesh=fsdp:16"], "unknown TPU version 'v5'"),
        (["--topology=v5e", "--mesh=fsdp:16"], "VERSION:LAYOUT"),
        (["--topology=v5e:4by4", "--mesh=fsdp:16"], "--topology=v5e:4by4"),
        (["--topology=v5e:0x4", "--mesh=fsdp:16"], "--topology=v5e:0x4"),
        (["--topology=v5e:4x4", "--mesh=fsdp:4,fsdp:4"], "names fsdp twice"),
        (["--topology=v5e:4x4", "--mesh=sweep:4,data:4"], "sweep stands alone"),
        (["--topology=v5e:4x4", "--mesh=arms:16"], "unknown mesh axis 'arms'"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["launch.py", "--experiment=compile", *flags]) == 2
    err = capsys.readouterr().err
    assert named in err and err.count("\n") == 1


def test_published_sizes() -> None:
    """Llama 3.2 1B and 3.1 8B, as their makers count them."""
    assert count_parameters(PRESETS["llama_1b"]) == 1_235_814_400
    assert count_parameters(PRESETS["llama_8b"]) == 8_030_261_248


def test_bytes_flops_and_gathers_of_a_step() -> None:
    mesh = sharding.make_mesh({"fsdp": 4})
    made = compile_step(SMALL, Hyper(), mesh)
    shapes = jax.eval_shape(lambda b: b, batch_shapes(SMALL))
    assert made.chips == 4 and made.parameters == count_parameters(SMALL)
    # Adam: parameters and two moments, split where a name has two letters or more; ids and weights by rows.
    state = 3 * sum(row.bytes for row in sharding.placements(_params(), mesh))
    rows = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes)) // 4
    assert 0 <= made.arguments - state - rows < 512  # and a key, two counters, the numbers of Hyper
    # Six FLOPs a parameter of a product and token, three of them again in attention's two products.
    tokens, products = 8 * 8, count_parameters(SMALL) - 32 * 16 - 7 * 2 * 16 - 3 * (24 + 16)
    assert made.flops == tokens * (6 * (products + 32 * 16) + 3 * 3 * 2 * 2 * 8 * 16)
    assert made.gathered == [] and {"all-gather", "all-reduce"} <= {row.kind for row in made.found}


def _params() -> object:
    from transformer_jax.train import init_state

    return jax.eval_shape(lambda key: init_state(SMALL, Hyper(), key), jax.random.key(0)).params


def test_a_stack_gathered_whole_is_named() -> None:
    """All layers of w1 at once, as a step without a scan over its layers might; one layer's is no fault."""
    mesh, params = sharding.make_mesh({"fsdp": 4}), _params()
    w = sharding.abstract({"w1_DF": jax.ShapeDtypeStruct((3, 16, 24), jnp.float32)}, mesh)
    whole = sharding.replicated(mesh)
    # A shape does not tell w1 from w2, which is as large.
    both = ["decoder/layers/ffn/w1_DF", "decoder/layers/ffn/w2_FD"]
    for out, named in ((lambda w: w["w1_DF"], both), (lambda w: w["w1_DF"][1], [])):
        text = jax.jit(out, out_shardings=whole).lower(w).compile().as_text()
        assert gathered_whole(params, mesh, collectives.read(str(text))) == named


def test_a_stack_gathered_over_one_of_two_axes_is_named() -> None:
    mesh, params = sharding.make_mesh({"fsdp": 2, "model": 2}), _params()
    found = [collectives.Collective("all-gather", f"f32[3,{D},12]{{2,1,0}}", 1, 0, "") for D in (16, 8)]
    assert "decoder/layers/ffn/w1_DF" in gathered_whole(params, mesh, found[:1])
    assert gathered_whole(params, mesh, found[1:]) == []


def test_a_sweep_spreads_its_arms_and_says_nothing() -> None:
    mesh = sharding.make_mesh({"sweep": 4})
    made = compile_sweep(resolve(SMALL.replace(task="copy")), Hyper(), 8, mesh)
    assert made.found == [] and made.chips == 4
    one = 3 * 4 * count_parameters(SMALL)
    assert 2 * one <= made.arguments < 2 * one + 20_000  # two arms a chip, and the data of the task


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is there")
def test_without_libtpu_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--topology=v5e:4x4: .*not installed.*\[tpu\]"):
        topology.slice_of("v5e:4x4")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the extra [tpu]")
def test_a_pod(tmp_path: Path) -> None:
    flags = ["--preset=tiny", "--vocab_size=256", "--batch_size=64", "--mesh=data:4,fsdp:4", f"--workdir={tmp_path}"]
    run = [sys.executable, "launch.py", "--experiment=compile", "--topology=v5e:4x4", *flags]
    done = subprocess.run(run, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "compile.json").read_text())
    assert found["chips"] == 16 and found["memory"] == 16 * 2**30 and found["gathered"] == []
    run[3] = "--topology=v5e:3x3"
    done = subprocess.run(run, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and "v5e:3x3" in done.stderr and done.stderr.count("\n") == 1
