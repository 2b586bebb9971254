"""Throughput lost against the fraction of failed GPUs, by policy: the setting of nonuniform TP (arXiv 2504.06095).

    python -m benchmarks.goodput_ntp            prints the rows
    python -m benchmarks.goodput_ntp --plot P   also draws them into P (svg, png or pdf)

32,768 GPUs in domains of 32, 128 replicas of 8 stages at tensor parallel degree 32, a 480B model (96 layers, hidden
20,480, 128 heads), reduced sizes 30 and 28.  Not stated there and assumed here: sequences of 8,192 tokens, 16
micro-batches of one sequence per replica (16.8M tokens a step), a tenth of a stage's time in communication, 24 GB
free per GPU, a boosted GPU 1.14 x as fast.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from cost_models.degraded import Outages, exact_factor, spares_needed
from cost_models.policies import POWER_BOOST, Geometry, Policy, level_shares, slowdowns
from cost_models.reduced import StageWork
from specs.model import Attention, Mlp

SIZES = (32, 30, 28)
FRACTIONS = (0.0005, 0.001, 0.002, 0.003, 0.004)
PAPER = Geometry(num_replicas=128, num_stages=8, group_size=32, domain_size=32, micro_batches=16, layers_per_stage=12)
NODES = Geometry(num_replicas=512, num_stages=8, group_size=8, domain_size=8, micro_batches=16, layers_per_stage=12)


@dataclass(frozen=True)
class Curve:
    """A policy on a setting."""

    name: str
    policy: Policy
    work: StageWork
    geometry: Geometry

    def loss(self, failed: float) -> float:
        """Share of throughput lost when each GPU is out with probability `failed`."""
        shares = level_shares(self.policy, self.geometry, (self.work,))
        return 1.0 - exact_factor(self.policy, self.geometry, shares, Outages(failed, 0.0))

    def spares(self, failed: float, target: float) -> int | None:
        """Spare domains for that share of full throughput."""
        shares = level_shares(self.policy, self.geometry, (self.work,))
        slow = slowdowns(self.policy, self.geometry, (self.work,))
        return spares_needed(self.policy, self.geometry, shares, slow, Outages(failed, 0.0), target=target)


def stage(degree: int, *, micro_batch: int = 1, free_bytes: float = 24e9, hidden: int = 20480) -> StageWork:
    """Twelve layers of the 480B model at a tensor parallel degree."""
    attention = Attention(hidden=hidden, num_heads=hidden // 160, num_kv_heads=hidden // 160, head_dim=160)
    mlp = Mlp(hidden=hidden, ffn=4 * hidden, gated=False)
    return StageWork(
        modules=((attention, (degree,), 12), (mlp, (degree,), 12)),
        num_ranks=degree,
        micro_batch=micro_batch,
        seq_len=8192,
        communication_share=0.1,
        free_bytes=free_bytes,
        shards=128,
    )


def curves() -> list[Curve]:
    """The paper's policies and ours."""
    one, two = stage(32), stage(32, micro_batch=2)
    half = replace(PAPER, micro_batches=8)  # the same batch in micro-batches of two sequences
    return [
        Curve("drop, in place", Policy("drop", "drop", packed=False), one, PAPER),
        Curve("drop, packed", Policy("drop", "drop"), one, PAPER),
        Curve("ntp 30, 28", Policy("ntp", "ntp", sizes=SIZES), one, PAPER),
        Curve("ntp, any size", Policy("ntp", "ntp"), one, PAPER),
        Curve("blocks per module", Policy("composed", "composed"), one, PAPER),
        Curve("blocks, 4 GB free", Policy("composed", "composed"), stage(32, free_bytes=4e9), PAPER),
        Curve("ntp 30, 28 boosted", Policy("ntp", "ntp", sizes=SIZES, boost=POWER_BOOST), one, PAPER),
        Curve("ntp 30, 28, two sequences", Policy("ntp", "ntp", sizes=SIZES), two, half),
        Curve("blocks, two sequences", Policy("composed", "composed"), two, half),
    ]


def node_curves() -> list[Curve]:
    """As many GPUs in nodes of 8, the same model with 8 x less per stage: 80 heads."""
    work = stage(8, hidden=12800)
    return [
        Curve("drop, packed", Policy("drop", "drop"), work, NODES),
        Curve("ntp", Policy("ntp", "ntp"), work, NODES),
        Curve("blocks per module", Policy("composed", "composed"), work, NODES),
    ]


def availability(domain: int, failed: float) -> float:
    """Share of domains without a failed GPU."""
    whole = (0.0,) * domain + (1.0,)
    return exact_factor(Policy("drop", "drop"), Geometry(512, 1, domain, domain, 16), whole, Outages(failed, 0.0))


def table(title: str, rows: list[Curve]) -> None:
    """Print losses in percent."""
    print(f"\n{title}\n{'percent of GPUs failed':28s}" + "".join(f"{100 * f:8.2f}" for f in FRACTIONS))
    for curve in rows:
        print(f"{curve.name:28s}" + "".join(f"{100 * curve.loss(f):8.2f}" for f in FRACTIONS))


def draw(rows: list[Curve], path: Path) -> None:
    """Loss against failed fraction."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "plait"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0))
    points = [i * 0.0002 for i in range(1, 26)]
    for curve in rows[1:]:
        axes.plot([100 * p for p in points], [100 * curve.loss(p) for p in points], label=curve.name)
    axes.set_xlabel("percent of GPUs failed")
    axes.set_ylabel("percent of throughput lost")
    axes.set_ylim(0, 8)
    axes.set_title("32,768 GPUs in domains of 32, TP32, PP8")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    rows = curves()
    table("Throughput lost, percent: 32,768 GPUs in domains of 32", rows)
    table("Throughput lost, percent: 32,768 GPUs in nodes of 8", node_curves())
    print("\nSpare domains for 99 % of full throughput\n" + " " * 28 + "".join(f"{100 * f:8.2f}" for f in FRACTIONS))
    for curve in rows[1:7]:
        print(f"{curve.name:28s}" + "".join(f"{curve.spares(f, 0.99)!s:>8s}" for f in FRACTIONS))
    print(f"\nDomains of 64 without a failed GPU at 0.1 % failed: {100 * availability(64, 0.001):.1f} %")
    if arguments.plot is not None:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
