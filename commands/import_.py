"""`plait import`: what other tools measured or wrote, as files that the other commands read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option("--out", "-o", help="File to write.")]

import_ = typer.Typer(
    help="Read results of nccl-tests, `nvidia-smi topo -m` or a Hugging Face config into a cluster or model file.",
    no_args_is_help=True,
)


@import_.command(name="nccl-tests")
def nccl_tests(
    files: Annotated[list[Path], typer.Argument(help="Outputs of nccl-tests programs, text or JSON (-J).")],
    cluster: Annotated[str, typer.Option(help="Cluster that they ran on: a preset such as h100x64, or a file.")],
    out: Out,
    op: Annotated[str | None, typer.Option(help="Collective, where a file does not name its program.")] = None,
) -> dict[str, object]:
    """Put measured collective curves into a cluster file; estimates use them in place of shipped ones."""
    from profiles.nccl_tests import OPS, curve_of, read_nccl_tests
    from specs.presets import load_cluster
    from specs.units import num_bytes

    if op is not None and op not in OPS.values():
        raise typer.BadParameter(f"--op {op!r} is none of {', '.join(OPS.values())}")
    base = load_cluster(cluster)
    read: list[dict[str, object]] = []
    curves = {(c.op, c.level, c.num_ranks, c.ranks_per_domain): c for c in base.collectives}
    for file in files:
        curve = curve_of(read_nccl_tests(file), base, op)
        curves[curve.op, curve.level, curve.num_ranks, curve.ranks_per_domain] = curve
        typer.echo(
            f"{file}: {curve.op} over {curve.num_ranks} ranks ({curve.ranks_per_domain} in a domain), "
            f"{len(curve.seconds)} sizes to {num_bytes(curve.payload_bytes[-1])}"
        )
        read.append({"file": str(file), "op": curve.op, "num_ranks": curve.num_ranks, "sizes": len(curve.seconds)})
    base.model_copy(update={"collectives": tuple(curves.values())}).save(out)
    typer.echo(f"wrote {out}")
    return {"wrote": str(out), "cluster": base.name, "num_curves": len(curves), "read": read}


@import_.command(name="topo")
def topo(
    file: Annotated[Path, typer.Argument(help="What `nvidia-smi topo -m` prints on one node.")],
    device: Annotated[str, typer.Option(help="Shipped device of the node, e.g. h100.")],
    out: Out,
    nodes: Annotated[int, typer.Option(min=1, help="Number of such nodes.")] = 1,
    card_gigabits: Annotated[
        float | None, typer.Option(min=1, help="Rate of one network card; left away: the device's usual network.")
    ] = None,
) -> dict[str, object]:
    """Make a cluster file of one node's links: how many devices, how they are joined, cards beside them."""
    from profiles.topo import cluster_of, read_topology
    from specs.presets import machines

    known = machines()
    if device not in known:
        raise typer.BadParameter(f"--device {device!r} is none of {', '.join(sorted(known))}")
    topology = read_topology(file)
    name = f"{device}x{len(topology.devices) * nodes}"
    cluster = cluster_of(topology, name, known[device], num_nodes=nodes, card_gigabits=card_gigabits)
    cluster.save(out)
    islands = topology.islands()
    order = [device for island in islands for device in island]
    if len(islands) > 1:
        typer.echo(f"{len(islands)} islands of {len(islands[0])} devices on NVLink: each is a scale-up domain")
    if order != sorted(order):
        typer.echo(
            f"start with CUDA_VISIBLE_DEVICES={','.join(map(str, order))}: ranks of an island are neighbours then"
        )
    for level, link in cluster.links.items():
        typer.echo(f"{level}: {link.name}, {link.bytes_per_second / 1e9:g} GB/s per device and direction")
    typer.echo(f"wrote {out}")
    rates = {level: link.bytes_per_second for level, link in cluster.links.items()}
    return {
        "wrote": str(out),
        "cluster": name,
        "num_devices": cluster.num_devices,
        "islands": islands,
        "bytes_per_second": rates,
    }


@import_.command(name="config")
def config(
    source: Annotated[str, typer.Argument(help="Folder of a Hugging Face model, or its config.json.")],
    out: Out,
) -> dict[str, object]:
    """Make a model file of a Hugging Face config.json."""
    from specs.presets import load_model
    from specs.tensors import num_parameters

    model = load_model(source)
    model.save(out)
    parameters = num_parameters(model.modules())
    typer.echo(f"{model.name}: {model.num_layers} layers, {parameters:,} parameters\nwrote {out}")
    return {"wrote": str(out), "model": model.name, "num_layers": model.num_layers, "num_parameters": parameters}
