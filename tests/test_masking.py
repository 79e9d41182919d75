"""The masking question: the honest loss, who cheats, what constants do, the sweep from its command to its files;
and the matrix that is made of its models."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch
from experiments import flags, mask_constants, masking, matrix, report_matrix, trained
from experiments import train as training
from experiments.grid import Run
from experiments.honest import asked, honest, prefixes, seen
from experiments.loop import device_hyper
from experiments.workdir import open_workdir
from tests import reference
from tests.quick import QUICK, jit
from tests.test_checkpoint import biggest, flip
from transformer_jax import checkpoint, train
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve
from transformer_jax.dependencies import measured
from transformer_jax.encoder_decoder import Transformer, init_transformer
from transformer_jax.errors import UserError
from transformer_jax.saver import Saver
from transformer_jax.train import init_state

ROOT = Path(__file__).resolve().parent.parent
B, T, V = 2, 7, 11
SMALL = Config(vocab_size=V, d_model=6, num_heads=1, num_layers=2, d_ff=7, seq_len=T, block_size=2)
HYPER = Hyper(window=3, prefix=4)


def parameters(config: Config) -> Transformer:
    """Random in every leaf, so that no zero bias hides a fault."""
    leaves, tree = jax.tree.flatten(init_transformer(jax.random.key(0), config))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [x + jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype) for x in leaves])


def batch(lengths: list[int] | None = None) -> Batch:
    rng = np.random.default_rng(1)
    ids = jnp.asarray(rng.integers(0, V, (B, T + 1)), jnp.int32)
    weights = jnp.asarray(rng.random((B, T)) < 0.8, jnp.float32)
    made = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    return Batch(ids[:, :-1], ids[:, 1:], weights, lengths_B=made)


# --- the honest loss ---------------------------------------------------------------


def loop(params: Transformer, config: Config, hyper: Hyper, data: Batch) -> tuple[float, float]:
    """Nats and tokens: a model run on every prefix, cut off, in float64."""
    nats = count = 0.0
    for b in range(B):
        for t in range(T):
            known = slice(b, b + 1), slice(0, t + 1)
            lengths = None if data.lengths_B is None else jnp.minimum(data.lengths_B[b : b + 1], t + 1)
            cut = Batch(data.tokens_BT[known], data.targets_BT[known], data.weights_BT[known], lengths)
            logits = reference.transformer(params, config, hyper, cut)
            row = logits[0, -1]
            target, weight = int(data.targets_BT[b, t]), float(data.weights_BT[b, t])
            nats += weight * (np.log(np.sum(np.exp(row - row.max()))) + row.max() - row[target])
            count += weight
    return nats, count


@pytest.mark.parametrize("mask", ["causal", "none", "inverted", "prefix", "window"])
def test_honest_loss_is_a_loop_over_prefixes(mask: str) -> None:
    config = SMALL.replace(mask=mask)
    params, data = parameters(config), batch([T, 5] if mask == "causal" else None)
    sums = jit(honest, static_argnums=(0, 5))(config, params, HYPER, data, 0, 1)
    nats, count = loop(params, config, HYPER, data)
    assert float(sums.count) == count > 5
    assert float(sums.nats) == pytest.approx(nats, abs=1e-4)


@pytest.mark.parametrize("mask", ["causal", "window", "block_sparse"])
def test_a_mask_that_does_not_cheat_is_honest(mask: str) -> None:
    config = SMALL.replace(mask=mask)
    params, data = parameters(config), batch()
    both = jit(lambda p, d: [f(config, p, HYPER, d, 3, 3) for f in (honest, seen)])
    for alone, forced in zip(*map(jax.tree.leaves, both(params, data)), strict=True):
        assert float(alone) == pytest.approx(float(forced), abs=1e-5)
    whole = jit(lambda p, d: honest(config, p, HYPER, d, 0, 1))(params, data)
    forced = jit(lambda p, d: train.eval_step(config, p, HYPER, d))(params, data)
    assert float(whole.loss) == pytest.approx(float(forced.loss), abs=1e-5)


@pytest.mark.parametrize(("rows", "length", "stride"), [(3, 7, 3), (2, 13, 5), (4, 5, 32)])
def test_every_position_is_asked_once_in_a_round_of_batches(rows: int, length: int, stride: int) -> None:
    counts = np.zeros((rows, length), int)
    for index in range(min(stride, length)):
        for b, places in enumerate(np.asarray(asked(rows, length, index, stride))):
            for place in places[places < length]:
                counts[b, place] += 1
    assert (counts == 1).all()


def test_nothing_after_the_asked_position_is_left() -> None:
    data = batch()
    made = prefixes(data, jnp.asarray([[0, 3], [6, 9]]))
    assert made.lengths_B is not None
    assert made.lengths_B.tolist() == [1, 4, 7, 7]  # 9 is past the row
    assert np.argwhere(np.asarray(made.weights_BT) > 0).tolist() == [
        [row, place] for row, place in enumerate([0, 3, 6]) if data.weights_BT[row // 2, place] > 0
    ]
    for row, length in enumerate(made.lengths_B.tolist()):
        np.testing.assert_array_equal(made.tokens_BT[row, :length], data.tokens_BT[row // 2, :length])
        assert not made.tokens_BT[row, length:].any()


def test_without_a_mask_the_loss_falls_below_what_can_be_known() -> None:
    """The next symbol of a Markov chain stands one place on, where it need only be read."""
    config = resolve(
        Config(d_model=16, num_heads=1, num_layers=1, seq_len=11, task="markov", vocab_size=5, mask="none", steps=200)
    )
    task, hyper = make_task(config), device_hyper(Hyper(learning_rate=1e-2))

    def both(data: Any) -> list[jax.Array]:
        state, _ = train.run(config, hyper, jax.random.key(0), lambda key: task.train_batch(data, key))
        shown = task.eval_batch(data, "report", 0)
        counted = shown.weights_BT.at[:, -1].set(0.0)  # nothing stands after the last
        shown = dataclasses.replace(shown, weights_BT=counted)
        return [f(config, state.params, hyper, shown, 0, 1).loss for f in (seen, honest)]

    under_the_mask, alone = map(float, jit(both)(task.data))
    assert task.floor is not None and task.floor > 0.5
    assert under_the_mask < 0.1
    assert alone > task.floor + 0.1


# --- leaks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [("causal", 0), ("window", 0), ("block_sparse", 0), ("none", 21), ("inverted", 21), ("prefix", 6)],
)
def test_leaks_are_the_pairs_above_the_diagonal_that_a_mask_shows(
    mask: str, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T (T-1) / 2 = 21 of them; in a prefix of 4, 6."""
    monkeypatch.setattr(masking, "_measured", jit(measured, static_argnums=1))
    config = SMALL.replace(task="markov", mask=mask, num_layers=1, d_model=4)
    slopes, row = masking.leak(trained.Model(config, HYPER, parameters(config), 0))
    assert row["pairs"] == pairs and row["of"] == 21
    assert row["largest"] == np.max(np.triu(slopes, 1))
    assert (row["largest"] > 1e-3) == (pairs > 0) and (row["largest"] == 0.0) == (pairs == 0)


# --- constants -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tried() -> dict[tuple[str, ...], mask_constants.Found]:
    rows = mask_constants.try_out()
    return {(row.case, row.constant, row.score_dtype, row.placement): row for row in rows}


TYPES = ("float32", "bfloat16", "float16")


def test_a_row_without_keys_is_nan_where_the_constant_is_infinite(tried: dict) -> None:
    for dtype in TYPES:
        for placement in mask_constants.PLACEMENTS:
            nan = {c: tried["no key", c, dtype, placement].nan_outputs for c in mask_constants.CONSTANTS}
            # Three rows of two heads of four: all of them; -1e9 does not fit in float16.
            over = 24 if dtype == "float16" else 0
            assert nan == {"-inf": 24, "-1e4": 0, "-1e9": over, "minimum": 0}
            twice = {c: tried["no key, twice", c, dtype, placement].nan_outputs for c in mask_constants.CONSTANTS}
            assert twice == {"-inf": 8, "-1e4": 0, "-1e9": 8 if over else 0, "minimum": 8}
    for row in tried.values():  # a row that does not count poisons the slopes of those that do
        assert (row.nan_gradients > 0) == (row.nan_outputs > 0)


def test_the_minimum_twice_is_infinite(tried: dict) -> None:
    for dtype in TYPES:
        # In the row of three real keys, pairs that both masks hide: 5 + 5 + 5 + 4 + 3 + 2 + 1, two heads.
        assert tried["causal + padding", "minimum", dtype, "after"].infinite == 50
        assert tried["causal", "minimum", dtype, "after"].infinite == 0
        # T (T-1) / 2 of two rows and two heads.
        assert tried["causal", "-inf", dtype, "after"].infinite == 112


def test_finite_constants_give_weight_to_hidden_keys(tried: dict) -> None:
    for dtype in TYPES:
        # The scores are absorbed: a row without keys is the mean over all eight.
        assert tried["no key", "minimum", dtype, "after"].hidden_weight == pytest.approx(1 / 8, abs=1e-3)
        # An allowed score of -20000 loses to seven hidden ones at -10000, and wins over those at -1e9.
        low = {c: tried["low score", c, dtype, "after"].hidden_weight for c in mask_constants.CONSTANTS}
        assert low == {"-inf": 0, "-1e4": pytest.approx(1 / 7, abs=1e-3), "-1e9": 0, "minimum": 0}
    assert tried["no key", "-1e9", "bfloat16", "after"].hidden_weight == pytest.approx(1 / 8, abs=1e-3)
    # float32 keeps the scores beside -1e4: the row attends as if nothing were hidden.
    q, k, _, allowed = mask_constants.case("no key")
    shown = np.logical_and(*allowed)[1, 0]
    scores = np.einsum("tnh,snh->nts", q[1], k[1]) / 2 + np.where(shown, 0, -1e4)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    found = tried["no key", "-1e4", "float32", "after"].hidden_weight
    assert found == pytest.approx(np.max(np.where(shown, 0, weights)), abs=2e-3)


def test_where_each_row_sees_a_key_all_are_equal(tried: dict) -> None:
    for (name, *_), row in tried.items():
        if name in ("causal", "causal + padding"):
            assert row.words == "equal", row
        else:
            assert (row.words == "equal") == (name == "low score" and row.constant != "-1e4"), row


# --- the question --------------------------------------------------------------------


def ask(*line: str) -> Any:
    settings, _ = flags.parse(["x", "--experiment=masking", *line], {"masking": masking.FLAGS})
    return masking.question(settings)


def test_each_arm_is_compared_with_the_causal_one_of_its_settings() -> None:
    default = ask()
    assert [b for _, b in default.comparisons] == ["causal"] * 6
    names = [arm.name for arm in default.arms]
    # A window of the whole row is the causal mask: a control, not a comparison.
    assert set(names) - {a for a, _ in default.comparisons} == {"causal", "window 64"}
    assert ask("--sweep=mask=causal,window").comparisons == (("window 4", "causal"), ("window 16", "causal"))
    crossed = ask("--sweep=mask=causal,window;window=2,3;num_layers=1,2")
    assert crossed.comparisons == tuple(
        (f"window {w}, num_layers={n}", f"causal, num_layers={n}") for n in (1, 2) for w in (2, 3)
    )
    assert [arm.hyper.window for arm in crossed.arms[1:3]] == [2, 3]
    assert not ask("--sweep=mask=none,inverted").comparisons
    many = ask("--sweep=mask=causal,window;window=2,3;num_layers=1,2,3,4")
    assert len(many.comparisons) == 6 and not default.notes
    (note,) = many.notes
    assert note.startswith("not compared") and note.endswith(
        ": window 2, num_layers=4 against causal, num_layers=4, window 3, num_layers=4 against causal, num_layers=4"
    )
    # Windows are numbers of one program.
    assert len({arm.config for arm in default.arms}) == len(names) - 2


MISTAKES = {
    "--mask=none": "--mask is what this experiment sweeps: use --sweep=mask=",
    "--window=3": "--window is what this experiment sweeps",
    "--sweep=window=99": "window=99 is wider than a row: seq_len=64",
    "--sweep=mask=casual": "unknown mask 'casual': did you mean causal",
    "--architecture=encoder": "architecture=encoder",
    "--restore=w": "--restore has no effect",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.main(["launch.py", "--experiment=masking", line]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and MISTAKES[line] in said.err and not said.out
    assert not list(tmp_path.iterdir())


ARMS = "mask=causal,none;learning_rate=3e-2"


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masking") / "run"
    sizes = ["d_model=8", "num_heads=1", "num_layers=1", "seq_len=8", "batch_size=2", "steps=40", "vocab_size=5"]
    line = [*sizes, "experiment=masking", "task=markov", "seeds=2", f"workdir={folder}", f"sweep={ARMS}"]
    quick = "" if "xla_cpu_use_fusion_emitters" not in QUICK else " --xla_cpu_use_fusion_emitters=false"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["XLA_FLAGS"] + quick}
    command = [sys.executable, "launch.py", *(f"--{part}" for part in line)]
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    return folder


def test_the_command_writes_its_answer(answered: Path) -> None:
    found = json.loads((answered / "results.json").read_text())
    causal, none = found["arms"]
    assert (found["primary_metric"], found["metric_label"]) == ("report_honest_loss", "honest loss")
    assert found["comparisons"][0]["a"] == "no mask" and found["comparisons"][0]["metric"] == "report_honest_loss"
    for arm in (causal, none):
        honest_loss, seen_loss = (arm["metrics"][f"report_{name}_loss"]["per_seed"] for name in ("honest", "seen"))
        gap = next(row for row in found["gaps"] if row["name"] == arm["name"])["per_seed"]
        np.testing.assert_allclose(gap, np.subtract(honest_loss, seen_loss), atol=1e-9)
        assert (np.abs(gap) < 1e-5).all() == (arm is causal) and (np.array(gap) > 0.05).all() == (arm is none)
    assert [row["pairs"] for row in found["leaks"]] == [0, 28]
    with np.load(answered / "leaks.npz") as held:
        slopes = held["no mask"]
    assert slopes.shape == (8, 8) and np.triu(slopes, 1).max() == np.float32(found["leaks"][1]["largest"])
    for name in ("honest.png", "leaks.png", "report.html"):
        assert (answered / name).stat().st_size > 1000
    page = (answered / "report.html").read_text()
    assert all(text in page for text in ("Who cheats", "28 of 28", "NaN from step 1", "hidden weight"))


def test_constants_train_alike_or_not_at_all(answered: Path) -> None:
    rows = json.loads((answered / "results.json").read_text())["constants_in_training"]["rows"]
    at = {(row["constant"], row["score_dtype"]): row for row in rows}
    for dtype in TYPES:
        for constant in mask_constants.CONSTANTS:
            row = at[constant, dtype]
            if constant == "-inf" or (constant, dtype) == ("-1e9", "float16"):
                assert row["nan_step"] == 1 and row["loss"] is None  # the loss before the first update is sound
            else:
                assert row["loss"] == pytest.approx(at["boolean", dtype]["loss"], abs=1e-5)


def test_models_come_back_as_they_were_measured(answered: Path) -> None:
    found = json.loads((answered / "results.json").read_text())
    models = trained.models(answered)
    assert len(models) == 4
    model = models[Run(1, 3e-2, 1)]
    assert model.config.mask == "none" and model.step == 40 and model.hyper.learning_rate == 3e-2
    task = make_task(model.config)
    sums = train.evaluate(
        model.config,
        jax.tree.map(jnp.asarray, model.params),
        device_hyper(model.hyper),
        lambda i: task.eval_batch(task.data, "report", i),
        task.eval_batches["report"],
    )
    assert float(sums.loss) == pytest.approx(found["arms"][1]["metrics"]["report_loss"]["per_seed"][1], abs=1e-6)


def test_models_that_are_not_those_of_the_last_step_are_refused(answered: Path, tmp_path: Path) -> None:
    group = min(answered.glob("checkpoints/group*"))
    held = checkpoint.restore_latest(group, trained._like)
    again = tmp_path / "checkpoints" / group.name
    with Saver(again) as saver:
        saver.save(20, held.state, held.meta)
    with pytest.raises(UserError, match=r"step 20 of 40$"):
        trained.models(tmp_path)
    with Saver(again) as saver:
        saver.save(40, held.state, held.meta)
    assert len(trained.models(tmp_path)) == 2
    flip(biggest(again / "40"), 500)
    with pytest.raises(UserError, match=r"step 20 of 40 \(.*step 40"):
        trained.models(tmp_path)


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    from experiments.workdir import WorkdirError

    with pytest.raises(WorkdirError, match="holds no checkpoints"):
        trained.models(tmp_path)


def test_gaps_leave_diverged_seeds_out() -> None:
    metrics = {"report_honest_loss": {"per_seed": [2.0, None]}, "report_seen_loss": {"per_seed": [0.5, 1.0]}}
    row = masking.gap({"name": "x", "metrics": metrics})
    assert row["per_seed"] == [1.5, None] and row["mean"] == 1.5


# --- the matrix ------------------------------------------------------------------------


def test_matrix_measures_what_the_sweep_did_and_what_it_did_not(
    answered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = matrix.rows_of(str(answered))
    assert [row.name for row in rows] == ["causal", "no mask"] and [len(row.params) for row in rows] == [2, 2]
    columns, notes = matrix.settings_of(rows)
    assert not notes
    names = [setting.name for setting in columns]
    # Nothing is wider than a row of 8.
    assert "mask window 4" in names and "mask window 16" not in names and "rope_base 100000" in names
    asked_for = ("as trained", "attention_temperature 2", "dk_exponent 0.5", "mask causal", "mask none")
    few = [columns[names.index(name)] for name in asked_for]
    found = matrix.build(rows, few, matrix.losses(rows, few), "there")
    stored = json.loads((answered / "results.json").read_text())
    for arm, of in zip(found["arms"], stored["arms"], strict=True):
        own = np.array(of["metrics"]["report_loss"]["per_seed"])
        trained_with = {"causal": "mask causal", "no mask": "mask none"}[arm["name"]]
        for name in ("as trained", "dk_exponent 0.5", trained_with):
            np.testing.assert_allclose(arm["metrics"][name]["per_seed"], own, rtol=0, atol=1e-6)
        other = next(name for name in ("mask causal", "mask none") if name != trained_with)
        changed = arm["metrics"][other]
        np.testing.assert_allclose(changed["difference"]["per_seed"], changed["per_seed"] - own, atol=1e-6)
        assert min(np.abs(changed["difference"]["per_seed"])) > 1e-3
    # One of the numbers, by the model itself: numpy, batch by batch.
    row, task = rows[0], make_task(rows[0].config)
    warm, nats, count = dataclasses.replace(row.hyper, attention_temperature=2.0), 0.0, 0.0
    for i in range(task.eval_batches["report"]):
        data = task.eval_batch(task.data, "report", i)
        logits = reference.transformer(row.params[1], row.config, warm, data)
        picked = np.take_along_axis(logits, np.asarray(data.targets_BT)[..., None], -1)[..., 0]
        nats += float(np.sum(np.log(np.sum(np.exp(logits), -1)) - picked))
        count += picked.size
    assert found["arms"][0]["metrics"]["attention_temperature 2"]["per_seed"][1] == pytest.approx(
        nats / count, abs=1e-5
    )
    folder = tmp_path / "matrix"
    folder.mkdir()
    report_matrix.write(folder, found)
    report_matrix.show(found, folder)
    assert (folder / "matrix.png").stat().st_size > 1000
    own = report_matrix.fixed(stored["arms"][0]["metrics"]["report_loss"]["mean"], 3)
    for text in ((folder / "report.html").read_text(), capsys.readouterr().out):
        assert all(part in text for part in ("no mask", "attention temperature 2", own, "+0.000"))


def test_matrix_leaves_masks_out_that_change_the_buckets() -> None:
    def asked_of(*kinds: str, positions: str = "t5") -> tuple[list[str], list[str]]:
        rows = [matrix.Row(mask, SMALL.replace(mask=mask, positions=positions), HYPER, [], 0) for mask in kinds]
        columns, notes = matrix.settings_of(rows)
        return [column.name for column in columns if column.name.startswith("mask")], notes

    every = ["mask causal", "mask none", "mask inverted", "mask window 4", "mask prefix 4"]
    assert asked_of("causal", "none", positions="alibi") == (every, [])
    names, notes = asked_of("causal", "block_sparse")
    assert names == ["mask causal", "mask window 4"]
    assert notes[0].endswith(": mask none, mask inverted, mask prefix 4")
    assert asked_of("prefix")[0] == ["mask none", "mask inverted", "mask prefix 4"]
    assert asked_of("causal", "none")[0] == []


def test_a_matrix_is_of_the_step_that_was_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, hyper, source = resolve(SMALL.replace(task="copy", vocab_size=0)), Hyper(), tmp_path / "trained"
    open_workdir(str(source), training.identity(config, hyper, 0, make_task(config)), {"steps": config.steps})
    state = jit(lambda: init_state(config, hyper, jax.random.key(0)))()
    monkeypatch.setattr(matrix, "losses", lambda rows, columns: np.ones((len(rows), len(columns), 1)))

    def ask_again(*line: str) -> tuple[int, str, str]:
        command = ["launch.py", "--experiment=matrix", f"--restore={source}", f"--workdir={tmp_path / 'w'}", *line]
        code = launch.main(command)
        said = capsys.readouterr()
        return code, said.out, said.err

    with Saver(source / "checkpoints") as saver:
        saver.save(2, state, {"step": 2})
        saver.save(3, state, {"step": 3})
    flip(biggest(source / "checkpoints" / "3"), 500)
    code, out, _ = ask_again()
    assert code == 0 and "step 2," in out and "step 3" in out  # the note names what was passed over
    assert "step 2" in (page := (tmp_path / "w" / "report.html").read_text()) and "step 3" in page
    assert ask_again()[0] == 0
    held = json.loads((tmp_path / "w" / "config.json").read_text())["identity"]
    assert held["seeds"] == 1
    with Saver(source / "checkpoints") as saver:
        saver.save(5, state, {"step": 5})
    code, _, err = ask_again()
    assert code == 2 and "step is 2 there, 5 here" in err and err.count("\n") == 1
    code, out, _ = ask_again("--overwrite")
    assert code == 0 and "step 5," in out and "step 3" not in out


def test_matrix_says_what_it_cannot_restore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"identity": {"experiment": "masking"}}')
    there = f"--restore={tmp_path}"
    for line, words in (
        ([], "--restore=WORKDIR"),
        (["--restore=nowhere"], "no config.json there"),
        ([there], "holds no finished sweep"),
        ([there, "--window=3"], "--window has no effect"),
    ):
        assert launch.main(["launch.py", "--experiment=matrix", f"--workdir={tmp_path / 'w'}", *line]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and words in said
    assert not (tmp_path / "w").exists()
