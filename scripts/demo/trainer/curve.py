"""The loss curve as a picture; needs the extra `plots`."""

import json
from pathlib import Path

WINDOW = 25  # steps whose mean is drawn over the single ones


def draw(log: Path, out: Path) -> None:
    """Training loss of every step, its running mean, and the held-out loss where it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    means = [sum(part) / len(part) for i in range(len(losses)) for part in [losses[max(0, i - WINDOW + 1) : i + 1]]]
    held = [(line["step"], line["held_out"]) for line in lines if "held_out" in line]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="#b0c4de", linewidth=0.6, label="training, each step")
    axes.plot(steps, means, color="#1f4e79", label=f"training, mean of {WINDOW}")
    if held:
        axes.plot(*zip(*held, strict=True), color="#c44e52", marker="o", markersize=3, label="held out")
    axes.set(xlabel="step", ylabel="loss, nats a token", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
