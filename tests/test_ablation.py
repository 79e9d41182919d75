"""The question of any setting, from its flags to its files, and the ensembles that are made of its seeds."""

import io
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import launch
from experiments import ablation, evaluating, flags, matrix, stats, trained, translating, written
from experiments import ask as asking
from experiments.grid import Run
from experiments.program import run_key
from experiments.sweep import Question
from tests.pairs_run import BASE, loaded, words, write_pairs
from tests.quick import jit
from transformer_jax import beam
from transformer_jax.batch import Batch
from transformer_jax.beam import Penalty
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import forward
from transformer_jax.errors import CheckpointError, ConfigError, DataError
from transformer_jax.train import evaluate as evaluate_one
from transformer_jax.train import evaluate_mixture, init_state

SIZES = [f"--{name}={getattr(BASE, name)}" for name in ("d_model", "num_heads", "num_layers", "seq_len")]
RATE = 5e-3


def ask(*line: str) -> Question:
    settings, _ = flags.parse(["x", "--experiment=ablation", *line], {"ablation": ablation.FLAGS})
    return ablation.question(settings)


# --- the question --------------------------------------------------------------------


def test_arms_are_the_values_of_the_fields_and_the_first_is_the_measure() -> None:
    of = ask("--sweep=norm=layernorm,rmsnorm;dropout_rate=0.0,0.1,0.2", "--d_model=32", "--num_heads=2")
    arms = of.arms
    assert [arm.name for arm in arms][:4] == [
        "norm=layernorm, dropout_rate=0.0", "norm=layernorm, dropout_rate=0.1", "norm=layernorm, dropout_rate=0.2",
        "norm=rmsnorm, dropout_rate=0.0",
    ]  # fmt: skip
    assert [(arm.config.norm, arm.hyper.dropout_rate) for arm in arms] == [
        (norm, rate) for norm in ("layernorm", "rmsnorm") for rate in (0.0, 0.1, 0.2)
    ]
    # Arms that differ in numbers share a program, though one of them needs no dropout at all.
    assert len({arm.config for arm in arms}) == 2 and {arm.config.d_model for arm in arms} == {32}
    # Every field against the arm of all first values, then what else differs in one field alone.
    assert of.comparisons == (
        ("norm=rmsnorm, dropout_rate=0.0", "norm=layernorm, dropout_rate=0.0"),
        ("norm=layernorm, dropout_rate=0.1", "norm=layernorm, dropout_rate=0.0"),
        ("norm=layernorm, dropout_rate=0.2", "norm=layernorm, dropout_rate=0.0"),
        ("norm=rmsnorm, dropout_rate=0.1", "norm=layernorm, dropout_rate=0.1"),
        ("norm=rmsnorm, dropout_rate=0.2", "norm=layernorm, dropout_rate=0.2"),
        ("norm=rmsnorm, dropout_rate=0.1", "norm=rmsnorm, dropout_rate=0.0"),
    )  # fmt: skip
    assert of.notes == (
        "not compared, as a family is at most 6: norm=rmsnorm, dropout_rate=0.2 against norm=rmsnorm, dropout_rate=0.0",
    )


def test_arms_of_pairs_are_what_train_trains() -> None:
    (arm,) = ask("--task=pairs", "--pairs=x.tsv", "--steps=300").arms
    assert (arm.name, arm.config.architecture, arm.config.warmup_steps) == ("as set", "encoder_decoder", 150)
    assert (arm.hyper.dropout_rate, arm.config.has("ema")) == (0.3, True)
    (arm,) = ask("--task=copy").arms
    assert (arm.config.architecture, arm.config.d_model, arm.config.steps) == ("decoder", 64, 300)


def test_each_arm_has_three_rates_unless_they_are_given() -> None:
    alone = ask()
    assert alone.learning_rates == (4e-3,) and not alone.comparisons and not alone.notes
    assert ask("--sweep=norm=layernorm,rmsnorm").learning_rates == (0.00133, 0.004, 0.012)
    given = ask("--sweep=norm=layernorm,rmsnorm;learning_rate=1e-2,1e-3")
    assert given.learning_rates == (1e-3, 1e-2) and len(given.arms) == 2
    one = ask("--sweep=norm=layernorm,rmsnorm", "--learning_rate=0.01")
    assert one.learning_rates == (0.01,) and "all arms at one learning rate, 0.01" in one.notes[0]


def test_what_is_compared_is_of_one_question(tmp_path: Path) -> None:
    """Losses of the same tokens, and what is written for the same sources; the notes name what is left out."""
    made = words(60, 0)
    files = {
        n: write_pairs(tmp_path / f"{n}.tsv", part) for n, part in (("a", made), ("b", made[:40]), ("c", made[40:]))
    }
    line = ["--task=pairs", f"--pairs={files['b']}", f"--dev={files['c']}", *SIZES[:3]]

    def of(*more: str) -> tuple[list[str], list[str], str]:
        made = ablation.settled(ask(*line, *more))
        named = [[f"{a} − {b}" for a, b in pairs] for pairs in (made.question.comparisons, made.pairs)]
        return *named, "\n".join(made.question.notes)

    losses, outputs, said = of("--seq_len=40", "--sweep=target_tokenizer=symbols,bytes;norm=layernorm,rmsnorm")
    norms = [f"target_tokenizer={t}, norm=rmsnorm − target_tokenizer={t}, norm=layernorm" for t in ("symbols", "bytes")]
    assert losses == norms and len(outputs) == 4
    assert "losses not compared, as they are of other tokens or data: target_tokenizer=bytes, norm=layernorm" in said
    assert "no --test: learning rates are chosen on the pairs that are reported on" in said
    assert "no --test: the report is on the pairs of dev" in said  # what `train` says, too
    # A source's tokenizer changes no token that is counted; a row's length changes which pairs are.
    losses, outputs, said = of(
        "--seq_len=12", f"--test={files['c']}", "--target_tokenizer=symbols", "--sweep=tokenizer=chars,bytes"
    )
    assert losses == outputs == ["tokenizer=bytes − tokenizer=chars"] and "chosen on the pairs" not in said
    losses, outputs, said = of("--sweep=seq_len=12,5")
    assert not losses and len(outputs) == 1 and "do not fit seq_len=5" in said
    losses, outputs, said = of("--seq_len=12", f"--sweep=test={files['c']},{files['a']}")
    assert not losses and not outputs and said.count("not compared") == 2
    with pytest.raises(DataError, match="do not fit seq_len=5"):
        ablation.settled(ask(*line, "--seq_len=5", "--strict"), strict=True)


def test_models_of_other_sizes_are_named() -> None:
    for more, said in (([], True), (["--match_ffn_parameters"], False)):
        made = ablation.settled(ask("--task=copy", "--sweep=ffn=relu,swiglu;norm=layernorm,rmsnorm", *more)).question
        assert made.title == "What do ffn and norm do?" and len(made.comparisons) == 4
        notes = [note for note in made.notes if note.startswith("compared at other numbers of parameters: ")]
        # Norms differ in a few scales, below what is named; SwiGLU has a third matrix.
        assert len(notes) == said and (not said or notes[0].count("ffn=swiglu") == notes[0].count("; ") + 1 == 2)


def test_lengths_of_rows_are_of_one_question_on_a_text_alone() -> None:
    for task, kept in (("text", 1), ("copy", 0)):
        made = ablation.settled(ask(f"--task={task}", "--sweep=seq_len=16,8", "--d_model=8", "--num_heads=1"))
        assert len(made.question.comparisons) == kept and not made.pairs


MISTAKES = {
    "--sweep=drop_rate=1": "unknown field 'drop_rate'",
    "--sweep=steps=1,2": "arms of one sweep train alike; use --steps",
    "--sweep=learning_rate=1,2 --learning_rate=3": "both given: which one?",
    "--sweep=d_model=16,32 --d_model=8": "both given: which one?",
    "--sweep=task=copy,reverse": "arms of one sweep are of one task; use --task",
    "--task=pairs --pairs=x.tsv --sweep=metrics=bleu,chrf": "the same models would be trained again; use --metrics",
    "--task=copy --sweep=bpe_size=500,600": "is read with --task=",
    "--sweep=mask=causal,none": "mask=none: a position would read what it is to say",
    "--mask=prefix --sweep=norm=layernorm,rmsnorm": "mask=prefix: a position would read what it is to say",
    "--mask=none --sweep=architecture=encoder,decoder": "mask=none: a position would read what it is to say",
    "--depth=full": "--depth has no effect in --experiment=ablation",
    "--task=pairs --pairs=x.tsv --positions=learned --max_positions=8": "seq_len=64",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line: str, capsys: Any, tmp_path: Path) -> None:
    code = launch.main(["launch.py", "--experiment=ablation", f"--workdir={tmp_path / 'w'}", *line.split()])
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and MISTAKES[line] in err
    assert not (tmp_path / "w").exists()


# --- the answer, and ensembles of it ----------------------------------------------------


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two arms that read other characters, two seeds each; the files that they learnt from are gone."""
    folder = tmp_path_factory.mktemp("ablation")
    made = words(330, 0)
    for name, part in (("train", made[:300]), ("dev", made[300:])):
        write_pairs(folder / f"{name}.tsv", part)
    line = [f"--pairs={folder / 'train.tsv'}", f"--dev={folder / 'dev.tsv'}", f"--workdir={folder / 'w'}", *SIZES]
    line += ["--steps=150", "--batch_size=32", "--dropout_rate=0", "--ema_decay=0", "--schedule=constant"]
    line += ["--seeds=2", "--sweep=tokenizer=chars,bytes", "--target_tokenizer=symbols", f"--learning_rate={RATE}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam, "_search", jit(beam.search, static_argnames=("beam", "n_best")))
        assert launch.main(["launch.py", "--experiment=ablation", "--task=pairs", *line]) == 0
        (folder / "train.tsv").unlink()
        yield folder / "w"


def dev(folder: Path) -> list[tuple[str, list[str]]]:
    lines = (folder.parent / "dev.tsv").read_text().splitlines()
    return [(source, [target]) for source, target in (line.split("\t") for line in lines)]


def test_what_each_seed_wrote_is_in_the_answer(answered: Path) -> None:
    found = json.loads((answered / "results.json").read_text())
    models, written = trained.models(answered), found["written"]
    assert [arm["name"] for arm in written["arms"]] == ["tokenizer=chars", "tokenizer=bytes"]
    assert written["metrics"][:2] == ["word_error_rate", "phone_error_rate"] and len(found["comparisons"]) == 1
    rates = set()
    for i, arm in enumerate(written["arms"]):
        assert (arm["items"], arm["models"]) == (30, 2)
        tokenizers = trained.tokenizers_of(str(answered), trained.arm_named(str(answered), arm["name"]))
        assert tokenizers.source.kind == arm["name"].split("=")[1]
        for seed in range(2):
            model = models[Run(i, RATE, seed)]
            one = translating.Translator((model.params,), model.config, model.hyper, tokenizers)
            scores = evaluating.evaluate_pairs(one, dev(answered)).scores
            for name, score in scores.items():
                assert arm["metrics"][name]["per_seed"][seed] == pytest.approx(score.value)
            rates.add(scores["phone_error_rate"].value)
    assert len(rates) > 2 and max(rates) < 60  # they have learnt something, each something else
    (row,) = written["comparisons"]
    a, b = (arm["metrics"]["word_error_rate"]["per_seed"] for arm in reversed(written["arms"]))
    assert (row["a"], row["b"]) == ("tokenizer=bytes", "tokenizer=chars")
    assert row["difference"] == pytest.approx(np.mean(np.subtract(a, b)))
    page = (answered / "report.html").read_text()
    assert "What they write" in page and "Paired by seed; a family of its own" in page


def test_the_seeds_of_an_arm_are_an_ensemble(answered: Path, capsys: Any) -> None:
    found = json.loads((answered / "results.json").read_text())["written"]
    models = trained.models(answered)
    for i, arm in enumerate(found["arms"]):
        made = loaded(f"--restore={answered}", f"--arm={arm['name']}")
        assert (
            made.names == [f"{answered}, {arm['name']}, seed {seed}" for seed in range(2)] and made.steps == [150] * 2
        )
        for seed, params in enumerate(made.translator.models):
            jax.tree.map(np.testing.assert_array_equal, params, models[Run(i, RATE, seed)].params)
        scores = evaluating.evaluate_pairs(made.translator, dev(answered)).scores
        assert arm["metrics"]["word_error_rate"]["ensemble"] == pytest.approx(scores["word_error_rate"].value)
    arm = "--arm=tokenizer=bytes"
    assert launch.main(["launch.py", "--experiment=evaluate", f"--restore={answered}", arm, "--show="]) == 0
    assert "2 models, step 150, 150" in capsys.readouterr().out
    (folder,) = answered.glob("evaluation-of-2-*")
    results = json.loads((folder / "results.json").read_text())["splits"]["dev"]
    assert results["metrics"]["word_error_rate"]["value"] == found["arms"][1]["metrics"]["word_error_rate"]["ensemble"]


def test_an_ensemble_translates(answered: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\n\nbad\n")))
    args = [f"--restore={answered}", "--arm=tokenizer=chars", "--beam=2"]
    assert launch.main(["launch.py", "--experiment=translate", *args]) == 0
    out = capsys.readouterr().out
    best = translating.translate(loaded(*args).translator, ["abc", "bad"]).best()
    assert out.split("\n") == [best[0], "", best[1], ""] and all(best)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "holds 2 arms: name one by --arm, one of 'tokenizer=chars', 'tokenizer=bytes'"),
        (("--arm=tokenizer=char",), "unknown arm 'tokenizer=char': did you mean tokenizer=chars"),
        (("--arm=tokenizer=chars", "--restore_step=best"), "--restore_step: --restore="),
        (("--arm=tokenizer=chars", "--average=2"), "keeps the models of its last step alone"),
    ],
)
def test_what_a_sweep_cannot_give_is_refused(answered: Path, args: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(f"--restore={answered}", *args)
    assert said in str(caught.value)


def test_diverged_seeds_write_nothing(answered: Path, tmp_path: Path) -> None:
    copy = tmp_path / "w"
    shutil.copytree(answered, copy, ignore=shutil.ignore_patterns("evaluation*"))

    def lose(seeds: list[int]) -> None:
        results = json.loads((answered / "results.json").read_text())
        per_seed = results["arms"][0]["metrics"]["report_loss"]["per_seed"]
        for seed in seeds:
            per_seed[seed] = None
        (copy / "results.json").write_text(json.dumps(results))

    lose([0])
    made = loaded(f"--restore={copy}", "--arm=tokenizer=chars")
    assert made.names == [f"{copy}, tokenizer=chars, seed 1"] and len(made.translator.models) == 1
    assert made.notes[0] == f"{copy}, tokenizer=chars, seed 0: diverged, left out"
    lose([0, 1])
    with pytest.raises(ConfigError, match="tokenizer=chars diverged with every seed"):
        loaded(f"--restore={copy}", "--arm=tokenizer=chars")
    results = json.loads((answered / "results.json").read_text())
    (copy / "results.json").write_text(json.dumps(results | {"steps": 100}))
    with pytest.raises(trained.WorkdirError, match="has gone on to step 150 after the answer at step 100"):
        loaded(f"--restore={copy}", "--arm=tokenizer=chars")
    (copy / "results.json").unlink()
    with pytest.raises(trained.WorkdirError, match="holds no finished sweep"):
        loaded(f"--restore={copy}", "--arm=tokenizer=chars")


def test_tokenizers_are_those_that_the_models_were_trained_with(answered: Path, tmp_path: Path) -> None:
    for row, arm in zip(matrix.rows_of(str(answered)), trained.arms(answered), strict=True):
        assert row.tokenizers is not None
        assert row.tokenizers.sha256 == arm.models[0].tokenizers, "not as the data has them now"
    copy = tmp_path / "w"
    shutil.copytree(answered, copy, ignore=shutil.ignore_patterns("evaluation*"))
    held = json.loads((copy / "tokenizers.json").read_text())
    held["of_arms"].reverse()
    (copy / "tokenizers.json").write_text(json.dumps(held))
    with pytest.raises(CheckpointError, match="tokenizer=chars was trained with other tokenizers than its"):
        loaded(f"--restore={copy}", "--arm=tokenizer=chars")
    (copy / "tokenizers.json").unlink()
    with pytest.raises(trained.WorkdirError, match="the sweep's own command writes it again"):
        loaded(f"--restore={copy}", "--arm=tokenizer=chars")


def test_a_sweep_is_no_workdir_of_train(answered: Path, tmp_path: Path, capsys: Any) -> None:
    def says(*args: str) -> str:
        assert launch.main(["launch.py", *args]) == 2
        return capsys.readouterr().err

    files = f"--pairs={answered.parent / 'dev.tsv'}"
    line = ["--experiment=train", "--task=pairs", files, f"--workdir={tmp_path / 'x'}", f"--restore={answered}"]
    assert "is a sweep: a run starts from a workdir of train" in says(*line)
    assert "holds ablation; a workdir of train is wanted" in says("--experiment=sample", f"--restore={answered}")
    (tmp_path / "config.json").write_text("{}")
    assert "its config.json is not one of ours" in says("--experiment=evaluate", f"--restore={tmp_path}")


def test_every_arms_data_are_what_a_run_is(tmp_path: Path) -> None:
    """A file that changed is seen, though it is the second arm's; where all arms share theirs, one digest says it."""
    made = words(40, 0)
    a, b = (write_pairs(tmp_path / f"{n}.tsv", part) for n, part in (("a", made[:20]), ("b", made[20:])))
    line = ["--task=pairs", f"--pairs={a}", f"--dev={a}", *SIZES]

    def identity(*more: str) -> dict[str, Any]:
        return asking.identity(ablation.settled(ask(*line, *more)).question)

    before = identity(f"--sweep=test={a},{b}")
    write_pairs(b, made[19:])
    after = identity(f"--sweep=test={a},{b}")
    assert before["data"] == after["data"] and before["data_of_arms"] != after["data_of_arms"]
    assert "data_of_arms" not in identity("--sweep=norm=layernorm,rmsnorm")


def test_a_run_that_is_stopped_shows_no_older_answer(answered: Path, monkeypatch: Any, capsys: Any) -> None:
    written_for = json.loads((answered / "results.json").read_text())
    monkeypatch.setattr(ablation.ask, "run", lambda *_: 0)
    monkeypatch.setattr(ablation, "settled", lambda of, strict: ablation.Asked(of, (), ()))
    for seeds, shown in ((2, True), (3, False)):
        line = [f"--workdir={answered}", f"--seeds={seeds}", "--task=pairs", "--pairs=x.tsv", "--steps=150"]
        assert launch.main(["launch.py", "--experiment=ablation", *line]) == 0
        out = capsys.readouterr().out
        assert ("word error rate" in out) == shown
        assert all(len(row) <= 80 for row in out.split("\n")) and written_for["seeds"] == 2


def test_an_interrupted_judgement_is_one_line(monkeypatch: Any, capsys: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ablation, "question", interrupted)
    assert launch.main(["launch.py", "--experiment=ablation"]) == 130
    assert capsys.readouterr().err == "launch.py: interrupted; what was saved is there for the same command\n"


@pytest.mark.parametrize(("metric", "better"), [("word_error_rate", "a"), ("bleu", "b")])
def test_the_better_arm_is_named_whatever_way_the_metric_points(metric: str, better: str) -> None:
    values = {"a": [1.0, 1.1, 1.0, 1.2, 1.0, 1.1], "b": [2.0, 2.2, 2.1, 2.0, 2.1, 2.1]}
    (row,) = stats.compare(values, [("a", "b")], metric)
    made = written._judged(row, metric)
    assert (made["lower"], made["better"], made["verdict"]) == ("a", better, f"{better} better")


# --- what an ensemble's loss is ---------------------------------------------------------


def test_the_loss_of_an_ensemble_is_of_the_mean_probability() -> None:
    """Two kinds of models against float64, over two batches with padding."""
    small = Config(vocab_size=7, d_model=8, num_heads=2, num_layers=1, seq_len=5)
    kinds = [(small, Hyper()), (small.replace(num_layers=2, positions="alibi"), Hyper(attention_temperature=2.0))]
    members = [(*kind, init_state(*kind, run_key(seed)).params) for seed, kind in enumerate(kinds)]
    # Far from uniform, or any mean would do.
    members = [(c, h, jax.tree.map(lambda x: 8 * x, p)) for c, h, p in members]
    rng = np.random.default_rng(0)
    tokens, weights = rng.integers(0, 7, (2, 3, 6)), rng.integers(0, 2, (2, 3, 5)).astype(np.float32)
    batches = Batch(*map(jax.numpy.asarray, (tokens[..., :-1], tokens[..., 1:], weights)))

    def batch_of(i: jax.Array) -> Batch:
        return jax.tree.map(lambda x: x[i], batches)

    def p(config: Config, hyper: Hyper, params: Any) -> np.ndarray:
        logits = np.stack([np.float64(forward(params, config, hyper, batch_of(i))[0]) for i in range(2)])
        e = np.exp(logits - logits.max(-1, keepdims=True))
        return np.take_along_axis(e / e.sum(-1, keepdims=True), tokens[..., 1:, None], -1)[..., 0]

    each = [p(*member) for member in members]
    sums = evaluate_mixture(members, batch_of, 2)
    wanted = -(weights * np.log(np.mean(each, axis=0))).sum()
    assert float(sums.nats) == pytest.approx(wanted, rel=1e-5) and float(sums.count) == weights.sum()
    assert abs(-(weights * np.mean(np.log(each), axis=0)).sum() - wanted) > 0.1
    alone = evaluate_one(*(members[0][i] for i in (0, 2, 1)), batch_of, 2)
    assert float(evaluate_mixture(members[:1], batch_of, 2).nats) == pytest.approx(float(alone.nats), rel=1e-6)


def test_the_loss_is_of_the_probabilities_that_the_search_ranks_by(answered: Path, tmp_path: Path) -> None:
    """Where a sum of ln p is the score, the loss of what was written, taken for the reference, is that score."""
    made = loaded(f"--restore={answered}", "--arm=tokenizer=chars", "--length_penalty=0", "--beam=2")
    (found,) = translating.translate(made.translator, ["bad"]).outputs
    assert made.translator.penalty == Penalty("power", 0.0)
    file = tmp_path / "one.tsv"
    file.write_text(f"bad\t{found[0].text}\n", encoding="utf-8")
    line = [f"--restore={answered}", "--arm=tokenizer=chars", f"--pairs={file}", f"--workdir={tmp_path / 'e'}"]
    assert launch.main(["launch.py", "--experiment=evaluate", *line]) == 0
    split = json.loads((tmp_path / "e" / "results.json").read_text())["splits"]["one.tsv"]
    assert split["tokens"] == len(found[0].ids)
    assert split["loss"] * split["tokens"] == pytest.approx(-found[0].score, rel=1e-4)
    assert split["perplexity"] == pytest.approx(math.exp(split["loss"]), rel=1e-6)
