"""The testbed: hosts that come and go without a trace, links of the rate that was asked for, fair turns."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.image import imread
from pydantic import TypeAdapter

from benchmarks.testbed import nonuniform, pictures
from benchmarks.testbed.agreement import Agreement, Case, run_case
from benchmarks.testbed.hosts import Bed, check_machine
from benchmarks.testbed.measure import Measured, forget_changed
from benchmarks.testbed.plans import BATCH, MODEL, SEQ_LEN, plan_of, shapes
from benchmarks.testbed.progress import Progress
from benchmarks.testbed.quotas import CGROUPS, held_back_arguments, quotas, set_share, share_of_core
from benchmarks.testbed.slow_rank import Recovery
from benchmarks.testbed.turns import Job, order
from cost_models.sources import device_costs
from cost_models.step import price
from specs.errors import BadInputError
from specs.plan import TrainingSpec
from specs.presets import load_cluster

ROOT = Path(__file__).resolve().parents[1]


def _can_make_hosts() -> bool:
    """A namespace and a share of a core can be made and removed."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"plait-probe-{os.getpid()}"
    try:
        with quotas(name, {0: 0.5}):
            pass
    except BadInputError:
        return False
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False).returncode == 0


needs_hosts = pytest.mark.skipif(not _can_make_hosts(), reason="network namespaces need root on Linux and iproute2")

# A server on the first host sends as fast as the cable takes; the client prints bytes per second.
SERVER = """
import socket
with socket.create_server(("0.0.0.0", 5001)) as listener:
    link, _ = listener.accept()
    for _ in range({blocks}):
        link.sendall(bytes(1 << 20))
    link.close()
"""
CLIENT = """
import socket, time
for _ in range(100):
    try:
        link = socket.create_connection(("10.213.77.1", 5001))
        break
    except OSError:
        time.sleep(0.1)
size, begin = 0, time.perf_counter()
while part := link.recv(1 << 20):
    size += len(part)
print(size / (time.perf_counter() - begin))
"""


def namespaces() -> list[str]:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()


def interfaces() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


@needs_hosts
def test_a_cable_has_its_rate_and_nothing_stays_behind() -> None:
    before, own = interfaces(), f"plait-{os.getpid()}"
    with Bed(2, 1, bits_per_second=2e8).up() as hosts:
        assert interfaces() == before, "the machine's own interfaces are not touched"
        start = ("ip", "netns", "exec")
        server = subprocess.Popen([*start, hosts.host(0), sys.executable, "-c", SERVER.format(blocks=12)])
        client = subprocess.run(
            [*start, hosts.host(1), sys.executable, "-c", CLIENT], capture_output=True, text=True, check=True
        )
        server.wait()
        # The bucket's first fill passes at once, headers take a few percent.
        assert 0.85 * 2e8 < 8 * float(client.stdout) < 1.15 * 2e8
    assert not [name for name in namespaces() if name.startswith(own)]
    assert interfaces() == before


@needs_hosts
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_takes_the_hosts_and_their_processes_along(how: signal.Signals) -> None:
    code = (
        "import subprocess, time\n"
        "from benchmarks.testbed.hosts import Bed\n"
        "with Bed(2, 1).up() as hosts:\n"
        "    subprocess.Popen(['ip', 'netns', 'exec', hosts.host(0), 'sleep', '600'])\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert maker.stdout is not None
    try:
        assert maker.stdout.readline() == b"up\n"
        assert any(name.startswith(f"plait-{maker.pid}-") for name in namespaces())
        maker.send_signal(how)
        maker.wait(timeout=30)
    finally:
        maker.kill()
        maker.stdout.close()
    assert not [name for name in namespaces() if name.startswith(f"plait-{maker.pid}-")]
    assert not [folder for root in CGROUPS for folder in root.glob(f"plait-{maker.pid}-*")]


@needs_hosts
def test_a_rank_runs_on_its_host_in_its_group_with_its_share() -> None:
    burn = (
        "import os, time; begin = time.perf_counter()\n"
        "while time.perf_counter() < begin + 0.5: pass\n"
        "print(time.process_time(), len(os.sched_getaffinity(0)), open('/proc/self/cgroup').read())"
    )
    with Bed(1, 2).up() as hosts:
        set_share(hosts.quotas[1], 0.4)
        command = [
            *hosts.enter(0),
            sys.executable,
            "-m",
            *held_back_arguments(hosts.quotas),
            "timeit",
            "-n1",
            "-r1",
            burn,
        ]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "RANK": "1"}, capture_output=True, text=True, check=True
        )
        cpu_seconds, cores = done.stdout.split()[:2]
        assert hosts.quotas[1].name in done.stdout
    assert int(cores) == 1
    # Its own start counts too; a quota that did not hold would give 0.5 s and more.
    assert float(cpu_seconds) < 0.4 * 0.5 + 0.2


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert share_of_core(1) == share_of_core(2) == 1.0
    assert 4 * share_of_core(4) < 2


@needs_hosts
def test_what_a_killed_maker_left_is_removed_by_the_next() -> None:
    code = "import os\nfrom benchmarks.testbed.hosts import Running, Bed\n"
    code += "Running(Bed(1, 1), f'plait-{os.getpid()}').make()\nprint(os.getpid())\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    left = f"plait-{done.stdout.strip()}-"
    assert [name for name in namespaces() if name.startswith(left)]
    deadline = time.monotonic() + 10
    with Bed(1, 1).up():
        assert not [name for name in namespaces() if name.startswith(left)]
    assert time.monotonic() < deadline


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BadInputError, match=r"needs root on Linux\. Run it as root"):
        check_machine()


def test_every_plan_takes_every_place_in_the_turns() -> None:
    names = [f"plan {i}" for i in range(5)]
    turns = [order(names, turn) for turn in range(10)]
    assert all(sorted(turn) == names for turn in turns)
    assert len({turn[0] for turn in turns}) >= 4
    before = {name: {turn[turn.index(name) - 1] for turn in turns} for name in names}
    assert all(len(found) >= 2 for found in before.values()), "no plan always follows the same one"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_at_least_twenty_different_plans(num_ranks: int) -> None:
    found = list(shapes(num_ranks, batch=BATCH))
    assert len(found) == len({shape.name for shape in found}) >= 20
    training = TrainingSpec(global_batch=BATCH, seq_len=SEQ_LEN, precision="fp32")
    cluster = load_cluster(f"h100x{num_ranks}")
    plans = [plan_of(shape, MODEL, cluster, training) for shape in found]
    assert {plan.world_size for plan in plans} == {num_ranks}
    assert len({(plan.pipelines, len(plan.replicas)) for plan in plans}) == len(found)


def test_recovered_share_of_what_a_slow_rank_costs() -> None:
    def at(seconds: float) -> Measured:
        return Measured(seconds, seconds, seconds, 5, (1, 1))

    # Half speed on one of two ranks: even cuts take twice as long, the best cuts 4/3.
    found = Recovery(2, {}, at(3.0), at(6.0), at(4.5))
    assert found.bound == pytest.approx(4.0)
    assert found.recovered == pytest.approx(0.75)


def measured_at(seconds: float) -> Measured:
    return Measured(seconds, 0.9 * seconds, 1.1 * seconds, 5, (1, 1))


def test_turns_of_a_plan_that_has_changed_are_forgotten(tmp_path: Path) -> None:
    training = TrainingSpec(global_batch=BATCH, seq_len=SEQ_LEN, precision="fp32")
    one, other, *_ = (plan_of(shape, MODEL, load_cluster("h100x2"), training) for shape in shapes(2, batch=BATCH))
    files = {"kept": tmp_path / "0.json", "changed": tmp_path / "1.json"}
    for file in files.values():
        one.save(file)
    Job(plans=files, out=tmp_path / "turns.jsonl").save(tmp_path / "job.json")
    (tmp_path / "turns.jsonl").write_text(
        "".join(f'{{"plan": "{name}", "turn": {turn}}}\n' for turn in range(2) for name in files)
    )
    forget_changed(tmp_path, {"kept": one, "changed": other, "new": other})
    left = (tmp_path / "turns.jsonl").read_text().splitlines()
    assert left == ['{"plan": "kept", "turn": 0}', '{"plan": "kept", "turn": 1}']


def test_a_finished_case_stands_as_it_was_measured(tmp_path: Path) -> None:
    case = Case(2, None)
    names = ("chosen", "slow")
    found = Agreement(
        case, "2026-11-30", {"chosen": 1.0, "slow": 2.0}, {name: measured_at(1.0) for name in names}, {"chosen": 0.01}
    )
    (tmp_path / "agreement.json").write_bytes(TypeAdapter(Agreement).dump_json(found))
    assert run_case(case, tmp_path, Progress()) == found


def test_pictures_are_drawn(tmp_path: Path) -> None:
    chosen, rival = measured_at(0.1), measured_at(0.2)
    training = TrainingSpec(global_batch=BATCH, seq_len=SEQ_LEN, precision="fp32")
    plan = plan_of(next(shapes(2, batch=BATCH)), MODEL, load_cluster("h100x2"), training)
    plan = plan.with_results(predicted=price(plan, device_costs(load_cluster("h100x2"), training)))
    plans = {nonuniform.CHOSEN: plan, nonuniform.UNIFORM: plan}
    measured = {nonuniform.CHOSEN: chosen, nonuniform.UNIFORM: rival}
    outcomes = [nonuniform.Outcome(nonuniform.cases()[number], None, plans, measured) for number in range(2)]
    pictures.draw_nonuniform(outcomes, tmp_path / "nonuniform.png")
    pictures.draw_slow_rank(Recovery(2, {}, chosen, rival, measured_at(0.15)), tmp_path / "slow.png")
    pictures.draw_host_lost(("a", "b"), ((1.0, 2.0), (3.0,)), (1.5, 2.5), tmp_path / "lost.png")
    for name in ("nonuniform", "slow", "lost"):
        pixels = imread(tmp_path / f"{name}.png")
        assert pixels.std() > 0.05, f"{name} is not blank"
