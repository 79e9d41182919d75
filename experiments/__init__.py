"""Questions that are asked by flags; `launch.py` runs them, each is one file here.

REGISTRY: name -> one line. The module experiments.NAME has
    FLAGS   the run flags it takes beside the fields of Config and Hyper
    run(settings) -> exit code
"""

REGISTRY: dict[str, str] = {
    "dk_scaling": "what does dividing attention scores by sqrt(d_k) buy? a sweep with statistics and a report",
    "masking": "what does each mask let a model learn, and which ones cheat? honest losses, leaks, constants",
    "temperature": "what does temperature do in attention, and to what a model writes? entropy, diversity, calibration",
    "matrix": "trained models under other temperatures, exponents, masks and RoPE bases (--restore=WORKDIR)",
    "ablation": "what does any setting do? arms of any fields, on any task, with statistics; ensembles of seeds",
    "train": "train one configuration on any task, with checkpoints; the same command again resumes",
    "evaluate": "loss, perplexity, samples; of pairs all metrics and a report (--restore=WORKDIR)",
    "inspect": "what a workdir's checkpoints hold: steps, code, configuration, counts and norms (--restore=WORKDIR)",
    "compile": "the training step compiled for a TPU pod that is not there: does it fit, what do chips exchange",
    "decoding": "samplers held to the exact distribution over all that a small model can write",
    "sample": "write text with a trained model, as it comes (--restore=WORKDIR --prompt=TEXT)",
    "translate": "stdin to stdout, a line in, a line out, with a model of pairs or several (--restore=WORKDIR)",
    "complexity": "time, FLOPs and bytes of dense, blockwise, banded and linear attention against the length",
    "mesh": "where a mesh puts each array of a model, and what its devices say to each other in a training step",
    "claims": "every claim of the articles checked: a number, a tolerance and a verdict for each",
    "shapes": "the shape of every array on the way through attention, printed from a real forward pass",
}
