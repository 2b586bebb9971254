"""`plait import`: what nccl-tests, `nvidia-smi topo -m` and Hugging Face print, as files that estimates use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
from cost_models.sources import device_costs
from profiles.nccl_tests import curve_of, read_nccl_tests
from profiles.topo import cluster_of, read_topology
from specs.base import load_document
from specs.cluster import ClusterSpec, CollectiveCurve
from specs.errors import BadInputError
from specs.plan import TrainingSpec
from specs.presets import cluster_preset, load_cluster, load_model, machines


def ranks(per_host: int, hosts: int, device: str = "NVIDIA H100 80GB HBM3") -> str:
    return "\n".join(
        f"#  Rank {host * per_host + slot:2} Group  0 Pid {6899 + slot:6} on host-{host} device {slot:2} "
        f"[0000:{4 + slot:02x}:00] {device}"
        for host in range(hosts)
        for slot in range(per_host)
    )


# all_reduce_perf on two nodes of 8 H100 (Google Cloud A3 Mega), shortened.
# Source: github.com/lessizzmore/create-a3mega-ztan-fork
TWO_NODES = f"""\
> mpirun -np 16 -npernode 8 /opt/src/nccl-tests/build/all_reduce_perf -b 8 -e 8G -f 2 -g 1

# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#
# Using devices
{ranks(8, 2)}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    135.8    0.00    0.00      0    123.5    0.00    0.00      0
     1048576        262144     float     sum      -1    203.2    5.16    9.68      0    207.2    5.06    9.49      0
    67108864      16777216     float     sum      -1   1261.6   53.20   99.74      0   1270.2   52.83   99.06      0
  8589934592    2147483648     float     sum      -1    47535  180.71  338.82      0    47743  179.92  337.35      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 70.742
"""

# The smallest configuration of a Hugging Face model.
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}

# The older form: no group, no root, an `error` column; here as mpirun --tag-output shows it.
OLDER = """\
[1,0]<stdout>:# nThread 1 nGpus 8 minBytes 1 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 validation: 0
[1,0]<stdout>:# Using devices
[1,0]<stdout>:#   Rank  0 Pid 112372 on localhost device  0 [0x00] A100-SXM4-40GB
[1,0]<stdout>:#   Rank  1 Pid 112372 on localhost device  1 [0x00] A100-SXM4-40GB
[1,0]<stdout>:#
[1,0]<stdout>:#                                             out-of-place                       in-place
[1,0]<stdout>:#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
[1,0]<stdout>:#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
[1,0]<stdout>:           0             0   float    34.27    0.00    0.00    N/A    33.57    0.00    0.00    N/A
[1,0]<stdout>:     8388608        262144   float    85.95   97.60   85.40    N/A    84.61   99.15   86.75    N/A
"""


def json_output(program: str = "reduce_scatter_perf", count_wrong: int = 0) -> dict[str, object]:
    """As nccl-tests 2.17 writes it with -J (src/util.cu)."""

    def body(microseconds: float) -> dict[str, object]:
        return {"time": microseconds, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0.0}

    devices = [
        {
            "rank": rank,
            "group": 0,
            "pid": 100 + rank,
            "hostname": "a",
            "device": rank,
            "device_hex": "0000:04:00",
            "device_info": "NVIDIA H100 80GB HBM3",
        }
        for rank in range(4)
    ]
    results = [
        {
            "size": size,
            "count": size // 4,
            "type": "float",
            "redop": "sum",
            "root": "    -1",
            "out_of_place": body(size / 1e5),
            "in_place": body(size / 2e5),
            "actual_iterations": 20,
            "experiment_name": "",
        }
        for size in (2**20, 2**24)
    ]
    return {
        "version": 1,
        "start_time": "2025-08-01 12:00:00",
        "args": [f"./build/{program}", "-g", "4", "-J", "out.json"],
        "env": ["NCCL_DEBUG=WARN"],
        "nccl_version": 22703,
        "config": {"nthreads": 1, "ngpus": 4, "devices": devices},
        "results": results,
        "out_of_bounds": {"count": count_wrong, "okay": not count_wrong},
        "average_bus_bandwidth": {"bandwidth": 1.0, "okay": "unchecked"},
        "errors": [],
        "end_time": "2025-08-01 12:00:09",
    }


def put(folder: Path, name: str, content: str | dict[str, object]) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def run(*arguments: object) -> str:
    """The command through its entry; its one sentence where it fails."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, BadInputError), result.exception
        return str(result.exception)
    return result.output


def test_text_across_nodes(tmp_path: Path) -> None:
    curve = curve_of(read_nccl_tests(put(tmp_path, "log.txt", TWO_NODES)), cluster_preset("h100x64"))
    assert (curve.op, curve.level, curve.num_ranks, curve.ranks_per_domain) == ("all_reduce", "scale_out", 16, 8)
    assert curve.payload_bytes == (8, 2**20, 2**26, 2**33)
    assert curve.seconds == pytest.approx((135.8e-6, 203.2e-6, 1261.6e-6, 47535e-6))


def test_older_text_needs_the_operation(tmp_path: Path) -> None:
    path = put(tmp_path, "log.txt", OLDER)
    with pytest.raises(BadInputError, match="does not name its program"):
        curve_of(read_nccl_tests(path), cluster_preset("a100-40gx8"))
    curve = curve_of(read_nccl_tests(path), cluster_preset("a100-40gx8"), "all_gather")
    assert (curve.level, curve.payload_bytes) == ("scale_up", (2**23,))
    assert curve.seconds == pytest.approx((85.95e-6,))
    named = put(tmp_path, "all_gather-8.txt", OLDER)
    assert curve_of(read_nccl_tests(named), cluster_preset("a100-40gx8")).op == "all_gather"


def test_json(tmp_path: Path) -> None:
    curve = curve_of(read_nccl_tests(put(tmp_path, "o.json", json_output())), cluster_preset("h100x64"))
    assert (curve.op, curve.level, curve.num_ranks) == ("reduce_scatter", "scale_up", 4)
    assert curve.seconds == pytest.approx((2**20 / 1e11, 2**24 / 1e11))


def test_a_rack_is_one_domain(tmp_path: Path) -> None:
    text = TWO_NODES.replace(ranks(8, 2), ranks(4, 4, "NVIDIA GB200"))
    curve = curve_of(read_nccl_tests(put(tmp_path, "log.txt", text)), cluster_preset("gb200x144"))
    assert (curve.level, curve.ranks_per_domain) == ("scale_up", 16)
    with pytest.raises(BadInputError, match=r"ran on NVIDIA GB200, the cluster h100x64 has H100"):
        curve_of(read_nccl_tests(tmp_path / "log.txt"), cluster_preset("h100x64"))


def test_estimates_use_the_curves(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    files = [put(tmp_path, "a.txt", TWO_NODES), put(tmp_path, "b.json", json_output())]
    assert "wrote" in run("import", "nccl-tests", *files, "--cluster", "h100x64", "-o", out)
    cluster = load_cluster(str(out))
    training = TrainingSpec(global_batch=8, seq_len=2048, precision="bf16")
    own, shipped = device_costs(cluster, training), device_costs(cluster_preset("h100x64"), training)
    across = {"num_ranks": 16, "payload_bytes": 2**26, "level": "scale_out", "ranks_per_domain": 8}
    assert own.collective("all_reduce", **across) == pytest.approx(1261.6e-6)
    assert own.collective("all_reduce", **across) != pytest.approx(shipped.collective("all_reduce", **across))
    inside = {"num_ranks": 4, "payload_bytes": 2**20, "level": "scale_up"}
    assert own.collective("reduce_scatter", **inside) == pytest.approx(2**20 / 1e11)
    # other sizes of group: the bytes on the wire are scaled; other operations and placements: as shipped
    wide = {"num_ranks": 8, "payload_bytes": 2**20 * 6 // 7, "level": "scale_up"}
    assert own.collective("reduce_scatter", **wide) == pytest.approx(2**20 / 1e11, rel=1e-5)
    assert own.collective("all_gather", **inside) == shipped.collective("all_gather", **inside)
    thin = across | {"ranks_per_domain": 1}
    assert own.collective("all_reduce", **thin) == shipped.collective("all_reduce", **thin)
    # a second import adds to the first and replaces what it measured again
    run("import", "nccl-tests", files[0], "--cluster", out, "-o", out)
    assert len(load_cluster(str(out)).collectives) == 2


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.txt", "nothing\n", "holds no timed size"),
        ("x.txt", TWO_NODES.replace("Rank", "Node"), "names 0 ranks"),
        ("x.txt", TWO_NODES.replace("0 OK", "7 FAILED"), "7 values came out wrong"),
        ("x.txt", TWO_NODES.replace("203.2", "fast"), "'fast' is not a time in microseconds"),
        ("x.txt", TWO_NODES.replace("  time", "cputime"), "Run the program without -C"),
        ("x.json", "[1]", "is not the JSON of nccl-tests"),
        ("x.json", json_output(count_wrong=3), "3 values came out wrong"),
        ("x.json", {k: v for k, v in json_output().items() if k != "config"}, "no 'config'"),
    ],
)
def test_bad_results_are_one_sentence(
    tmp_path: Path, name: str, content: str | dict[str, object], sentence: str
) -> None:
    out = tmp_path / "cluster.json"
    said = run("import", "nccl-tests", put(tmp_path, name, content), "--cluster", "h100x64", "-o", out)
    assert sentence in said
    assert "\n" not in said
    assert not out.exists()


def test_more_ranks_than_the_cluster_has(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"has 16 ranks, 8 on one host; the cluster h100x8 has 8 in domains of 8"):
        curve_of(read_nccl_tests(put(tmp_path, "log.txt", TWO_NODES)), cluster_preset("h100x8"))
    assert "is of all_reduce_perf" in run(
        *("import", "nccl-tests", tmp_path / "log.txt", "--cluster", "h100x64", "--op", "all_gather", "-o", "x.json")
    )


def table(path: str, size: int = 8, cards: int = 0) -> str:
    """As `nvidia-smi topo -m` prints it, with `cards` network cards, the first beside the first device."""
    names = [f"GPU{i}" for i in range(size)] + [f"NIC{i}" for i in range(cards)]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    for row, name in enumerate(names):
        cells = []
        for column in range(len(names)):
            both_devices = row < size and column < size
            beside = abs(row - column) == size
            cells.append(" X " if row == column else path if both_devices else "PIX" if beside else "SYS")
        lines.append(name + "\t" + "\t".join(cells) + ("\t0-51\t0\t\tN/A" if row < size else ""))
    return "\n".join(
        [*lines, "", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set of NVLinks"]
    )


@pytest.mark.parametrize(
    ("device", "path", "rate"), [("h100", "NV18", 450e9), ("a100", "NV12", 300e9), ("h100", "NODE", 64e9)]
)
def test_topology(tmp_path: Path, device: str, path: str, rate: float) -> None:
    out = tmp_path / "cluster.json"
    said = run("import", "topo", put(tmp_path, "t", table(path)), "--device", device, "--nodes", 4, "-o", out)
    assert "wrote" in said
    cluster = load_document(ClusterSpec, out, "cluster")
    assert cluster.num_devices == 32
    assert cluster.links["scale_up"].bytes_per_second == rate
    assert path in cluster.links["scale_up"].source
    assert cluster.links["scale_out"] == machines()[device].scale_out


def test_cards_beside_devices(tmp_path: Path) -> None:
    topology = read_topology(put(tmp_path, "t", table("NV18", cards=4)))
    cluster = cluster_of(topology, "x", machines()["h100"], num_nodes=2, card_gigabits=400.0)
    assert cluster.links["scale_out"].bytes_per_second == 4 * 50e9 / 8
    bare = read_topology(put(tmp_path, "u", table("NV18")))
    with pytest.raises(BadInputError, match="no network card beside a device"):
        cluster_of(bare, "x", machines()["h100"], num_nodes=2, card_gigabits=400.0)


BRIDGED = """
     GPU0 GPU1 GPU2 GPU3 CPU Affinity
GPU0  X   NV12 SYS  SYS  0-31
GPU1 NV12  X   SYS  SYS  0-31
GPU2 SYS  SYS   X   NV12 32-63
GPU3 SYS  SYS  NV12  X   32-63
"""
CROSSED = """
     GPU0 GPU1 GPU2 GPU3
GPU0  X   PHB  NV12 PHB
GPU1 PHB   X   PHB  NV12
GPU2 NV12 PHB   X   PHB
GPU3 PHB  NV12 PHB   X
"""
CHAIN = """
     GPU0 GPU1 GPU2 GPU3
GPU0  X   NV12 SYS  NV12
GPU1 NV12  X   NV12 SYS
GPU2 SYS  NV12  X   NV12
GPU3 NV12 SYS  NV12  X
"""


@pytest.mark.parametrize(
    ("text", "nodes", "islands", "inside", "across"),
    [
        (BRIDGED, 1, [[0, 1], [2, 3]], 300e9, 32e9),
        (BRIDGED, 2, [[0, 1], [2, 3]], 300e9, None),  # the network is slower than PCIe
        (CROSSED, 1, [[0, 2], [1, 3]], 300e9, 32e9),
        (CHAIN, 1, [[0, 1, 2, 3]], 32e9, None),  # not each to each: one domain, as slow as its slowest pair
    ],
)
def test_bridged_devices_are_domains(
    tmp_path: Path, text: str, nodes: int, islands: list[list[int]], inside: float, across: float | None
) -> None:
    topology = read_topology(put(tmp_path, "t", text))
    assert topology.islands() == islands
    machine = machines()["a100"]
    cluster = cluster_of(topology, "x", machine, num_nodes=nodes, card_gigabits=None)
    assert [(group.count, group.devices_per_node) for group in cluster.nodes] == [
        (nodes * len(islands), len(islands[0]))
    ]
    assert cluster.links["scale_up"].bytes_per_second == inside
    expected = machine.scale_out.bytes_per_second if across is None else across
    assert cluster.links["scale_out"].bytes_per_second == expected


def test_islands_that_are_no_neighbours_say_how_to_start(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    said = run("import", "topo", put(tmp_path, "t", CROSSED), "--device", "a100", "-o", out)
    assert "2 islands of 2 devices on NVLink" in said
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in said
    plan = run("plan", "--model", "llama-3-8b", "--cluster", out, "--global-batch", 8, "--seq-len", 2048, "--json")
    assert '"step_time_seconds"' in plan


@pytest.mark.parametrize(
    ("content", "device", "sentence"),
    [
        ("hello", "h100", "no line of GPU0"),
        ("\n".join(table("NV18").splitlines()[:5]), "h100", "the line of GPU4 is missing"),
        (table("WARP"), "h100", "unknown path 'WARP'"),
        (table("NV7"), "mi300x", "no rate of MI300X is known"),
    ],
)
def test_bad_topologies_are_one_sentence(tmp_path: Path, content: str, device: str, sentence: str) -> None:
    out = tmp_path / "cluster.json"
    said = run("import", "topo", put(tmp_path, "t", content), "--device", device, "-o", out)
    assert sentence in said
    assert not out.exists()


def test_unknown_names_are_usage_errors(tmp_path: Path) -> None:
    path = put(tmp_path, "t", table("NV18"))
    result = CliRunner().invoke(cli.app, ["import", "topo", str(path), "--device", "v100", "-o", "x"])
    assert result.exit_code == 2
    result = CliRunner().invoke(
        cli.app, ["import", "nccl-tests", str(path), "--cluster", "h100x8", "--op", "x", "-o", "x"]
    )
    assert result.exit_code == 2


def test_config(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    keys = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
    }
    put(folder, "config.json", keys)
    out = tmp_path / "model.json"
    assert "2 layers" in run("import", "config", folder, "-o", out)
    assert load_model(str(out)) == load_model(str(folder))
    put(folder, "config.json", keys | {"model_type": "nobody"})
    assert "nobody" in run("import", "config", folder, "-o", tmp_path / "other.json")


def test_curves_are_checked() -> None:
    good = CollectiveCurve(
        op="all_reduce",
        level="scale_up",
        num_ranks=8,
        ranks_per_domain=8,
        payload_bytes=(8, 16),
        seconds=(1e-6, 2e-6),
        source="s",
    )
    for change in ({"seconds": (1e-6,)}, {"payload_bytes": (16, 8)}, {"ranks_per_domain": 4}):
        with pytest.raises(ValueError, match=r"each needs|ascend|in a domain"):
            CollectiveCurve.model_validate(good.model_dump() | change)
