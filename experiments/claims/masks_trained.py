"""Chapter D's training: what a decoder learns under the mask as it is printed (D07)."""

from pathlib import Path

from experiments.claims.paired import lower, per_seed
from experiments.claims.record import Numbers, Words, shown
from experiments.claims.training import arms, mean, trained
from experiments.grid import Arm
from experiments.honest import honest, seen
from experiments.sweep import Question
from transformer_jax.config import Config, Hyper

SEEDS = 6
BASE = Config(d_model=32, num_heads=2, num_layers=2, seq_len=64, batch_size=8, steps=300, scan_unroll=0)
CHEATING = Question(
    name="claim_D07",
    title="What does a decoder learn that sees the future?",
    arms=tuple(Arm(kind, BASE.replace(mask=kind), Hyper()) for kind in ("causal", "inverted")),
    learning_rates=(1e-3, 3e-3, 1e-2, 3e-2),
    comparisons=(("causal", "inverted"),),
    losses={"honest": honest, "seen": seen},
    primary="report_honest_loss",
    selection="selection_honest_loss",
)


def cheating(folder: Path) -> Numbers:
    """The loss that each mask shows under teacher forcing, and the honest one: asked without what comes later."""
    names = {"causal": Words("causal", "因果掩码"), "inverted": Words("inverted", "写反的掩码")}
    by_name = arms(trained(CHEATING, SEEDS, folder, names=names)[0])
    causal, inverted = by_name["causal"], by_name["inverted"]
    metrics = {"seen": "report_seen_loss", "honest": "report_honest_loss"}
    label = Words("loss shown, inverted − causal", "掩码下的损失，写反 − 因果")
    yield from lower("cheats", label, per_seed(inverted, metrics["seen"]), per_seed(causal, metrics["seen"]))
    label = Words("honest loss, causal − inverted", "不许看未来时的损失，因果 − 写反")
    yield from lower("worth", label, per_seed(causal, metrics["honest"]), per_seed(inverted, metrics["honest"]))
    for loss, en, zh in (("seen", "loss shown", "掩码下的损失"), ("honest", "honest loss", "不许看未来时的损失")):
        for name, arm, kind in (("causal", causal, "因果"), ("inverted", inverted, "写反")):
            label = Words(f"{en}, {name}, nats a token", f"{zh}（{kind}），每词元 nat")
            yield shown(f"{loss}_{name}", label, mean(arm, metrics[loss]), "float32")
