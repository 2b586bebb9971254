"""Results of nccl-tests (and rccl-tests), text or JSON, as collective curves of a cluster.

Text is what `all_reduce_perf` and its siblings print, JSON what they write with `-J FILE`.  Both name the ranks with
their hosts and devices, and give for each size the time out of place, which is what an engine's collectives are.
The size is that of the whole tensor: gathered, or before it is scattered.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from specs.cluster import ClusterSpec, CollectiveCurve, CollectiveOp
from specs.errors import BadInputError

# Program names, without their ending `_perf`.
OPS: dict[str, CollectiveOp] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "sendrecv": "point_to_point",
}
_PROGRAM = re.compile(rf"\b({'|'.join(OPS)})_perf")
# A scale-up domain of more devices is a rack: its hosts, filled one by one, belong together.
LARGEST_SERVER = 8
# What mpirun --tag-output puts before each line.
_TAG = re.compile(r"^\[\d+,\d+\]<\w+>:")
# Older versions have no group, and no domain in the bus id.
_RANK = re.compile(r"#\s+Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)")


@dataclass(frozen=True, slots=True)
class NcclResult:
    """One run of one program.  `hosts` of the ranks of its first group; `times` by bytes, in seconds."""

    path: Path
    program: str | None
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    times: dict[int, float]


def read_nccl_tests(path: Path) -> NcclResult:
    """One file.  Raises `BadInputError` when it is neither form, holds no result, or reports wrong values."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}. Check the path.") from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path} is not a text file in UTF-8. Give what an nccl-tests program printed.") from None
    try:
        data = json.loads(text)
    except ValueError:
        result = _read_text(path, text)
    else:
        result = _read_json(path, data)
    if not result.times:
        raise BadInputError(f"{path} holds no timed size. Give the whole output of an nccl-tests program.")
    if len(result.hosts) < 2:
        raise BadInputError(f"{path} names {len(result.hosts)} ranks; a collective needs two. Run it on more devices.")
    return result


def _read_text(path: Path, text: str) -> NcclResult:
    program = _PROGRAM.search(text)
    lines = [_TAG.sub("", line).strip() for line in text.splitlines()]
    ranks = [match.groups() for match in map(_RANK.match, lines) if match]
    first = [(host, device.strip()) for group, host, device in ranks if group in (None, ranks[0][0])]
    found_wrong = re.search(r"# Out of bounds values\s*:\s*(\d+) FAILED", text)
    if found_wrong:
        _refuse_wrong(path, int(found_wrong[1]))
    columns: list[str] = []
    times: dict[int, float] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if line.startswith("#") and {"size", "algbw", "busbw"} <= set(words):
            columns = line.lstrip("# ").split()
        elif columns and words and words[0].isdigit() and len(words) >= len(columns):
            if "time" not in columns:
                raise BadInputError(f"{path} gives the host's time, not the collective's. Run the program without -C.")
            times[int(words[0])] = _seconds(path, f"line {number}", words[columns.index("time")])
    return NcclResult(path, program[1] if program else None, *_columns(first), times)


def _read_json(path: Path, data: object) -> NcclResult:
    try:
        if not isinstance(data, dict):
            raise TypeError
        program = _PROGRAM.search(" ".join(map(str, data["args"])))
        ranks = data["config"]["devices"]
        first = [(rank["hostname"], rank["device_info"]) for rank in ranks if rank["group"] == ranks[0]["group"]]
        wrong = int(data["out_of_bounds"]["count"])
        times = {}
        for row in data["results"]:
            body = row["out_of_place"] or row["in_place"]
            times[int(row["size"])] = _seconds(path, f"size {row['size']}", body["time"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        what = f"no {error.args[0]!r}" if isinstance(error, KeyError) else "another form"
        raise BadInputError(f"{path} is not the JSON of nccl-tests ({what}). Write it with -J FILE.") from None
    if wrong:
        _refuse_wrong(path, wrong)
    return NcclResult(path, program[1] if program else None, *_columns(first), times)


def _columns(ranks: list[tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(host for host, _ in ranks), tuple(sorted({device for _, device in ranks if device}))


def _refuse_wrong(path: Path, count: int) -> None:
    raise BadInputError(f"{path}: {count} values came out wrong. Repair the network first; its times mean nothing.")


def _seconds(path: Path, where: str, value: object) -> float:
    try:
        microseconds = float(str(value))
    except ValueError:
        microseconds = 0.0
    if not 0.0 < microseconds < float("inf"):
        raise BadInputError(f"{path}, {where}: {value!r} is not a time in microseconds. Give the output unchanged.")
    return microseconds * 1e-6


def curve_of(result: NcclResult, cluster: ClusterSpec, op: CollectiveOp | None = None) -> CollectiveCurve:
    """The result as a curve of `cluster`; `op` where the file does not name its program.

    Raises `BadInputError` when the operation is unknown or the ranks do not fit the cluster.
    """
    named = OPS.get(result.program or "") or next((OPS[n] for n in OPS if n in result.path.name), None)
    if op is not None and result.program is not None and OPS[result.program] != op:
        raise BadInputError(f"{result.path} is of {result.program}_perf, not of {op}. Leave --op away.")
    chosen = op or named
    if chosen is None:
        raise BadInputError(
            f"{result.path} does not name its program. Say which with --op ({', '.join(OPS.values())})."
        )
    known = sorted({group.device for group in cluster.nodes})
    for seen in result.devices:
        if not any(name.split("-")[0] in seen for name in known):
            raise BadInputError(f"{result.path} ran on {seen}, the cluster {cluster.name} has {', '.join(known)}.")
    ranks, per_host = len(result.hosts), Counter(result.hosts)
    domain = max(group.devices_per_node for group in cluster.nodes)
    if ranks > cluster.num_devices or max(per_host.values()) > domain:
        raise BadInputError(
            f"{result.path} has {ranks} ranks, {max(per_host.values())} on one host; the cluster {cluster.name} has "
            f"{cluster.num_devices} in domains of {domain}. Name the cluster that it ran on."
        )
    hosts_per_domain = domain // max(per_host.values()) if domain > LARGEST_SERVER else 1
    in_domain = min(ranks, max(per_host.values()) * hosts_per_domain)
    sizes = sorted(size for size in result.times if size > 0)
    return CollectiveCurve(
        op=chosen,
        level="scale_up" if in_domain >= ranks else "scale_out",
        num_ranks=ranks,
        ranks_per_domain=in_domain,
        payload_bytes=tuple(sizes),
        seconds=tuple(result.times[size] for size in sizes),
        source=f"nccl-tests, {result.path.name}: {ranks} ranks on {len(per_host)} hosts, out of place",
    )
