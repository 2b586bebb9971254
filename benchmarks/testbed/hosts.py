"""Hosts made of network namespaces, joined by links of a given rate; every rank with its share of a core.

A hub namespace holds a bridge; each host is a namespace with one interface on it.  A token bucket (`tc tbf`) on both
ends of each cable limits its rate in both directions.  Traffic inside a host goes over its loopback, unlimited.  No
interface of the machine itself is touched.  Everything carries the name and process of its maker, so that what a
killed maker left behind is found and removed by the next one.

Needs Linux, root, iproute2 and the cgroup controller `cpu`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.testbed.quotas import cgroup_root, held_back_arguments, make_quota, remove_quotas, share_of_core
from specs.errors import BadInputError

PREFIX = "plait"
SUBNET = "10.213.77"  # inside the namespaces only
PIECE_SECONDS, MIN_PIECE, MAX_PIECE = 131e-6, 1 << 13, 1 << 16  # of what goes through a cable at once, bytes
PORT = 29519
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Bed:
    """`num_hosts` hosts of `ranks_per_host` ranks."""

    num_hosts: int
    ranks_per_host: int
    bits_per_second: float | None = None  # of each host's cable; None: as fast as the kernel copies

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_hosts * self.ranks_per_host

    @contextmanager
    def up(self) -> Iterator[Running]:
        """The hosts, until the block ends, however it ends.

        Raises:
            BadInputError: this machine or user cannot make network namespaces or CPU quotas.
        """
        check_machine()
        remove_left_behind()
        running = Running(self, f"{PREFIX}-{os.getpid()}")
        # Ctrl-C too: a process that was started in the background may have inherited to ignore it.
        previous = {which: signal.signal(which, _interrupt) for which in (signal.SIGINT, signal.SIGTERM)}
        try:
            running.make()
            yield running
        finally:
            # A second Ctrl-C must not leave half of it behind.
            for which in previous:
                signal.signal(which, signal.SIG_IGN)
            remove(running.name)
            for which, handler in previous.items():
                signal.signal(which, handler)


@dataclass
class Running:
    """Hosts that are up."""

    bed: Bed
    name: str
    quotas: dict[int, Path] = field(default_factory=dict)  # the cgroup of each rank

    def make(self) -> None:
        """Namespaces, cables, limits, quotas."""
        hub = f"{self.name}-hub"
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge0", "up")
        for host in range(self.bed.num_hosts):
            space = self.host(host)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            # Both ends are born inside their namespaces: the machine's own list of interfaces never shows them.
            peer = ("peer", "name", f"port{host}", "netns", hub)
            _ip("-n", space, "link", "add", "eth0", "type", "veth", *peer)
            _ip("-n", space, "addr", "add", f"{SUBNET}.{host + 1}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", hub, "link", "set", f"port{host}", "master", "bridge0", "up")
            if self.bed.bits_per_second is not None:
                for place, device in ((space, "eth0"), (hub, f"port{host}")):
                    _limit(place, device, self.bed.bits_per_second)
        share = share_of_core(self.bed.world_size)
        self.quotas = {rank: make_quota(self.name, rank, share) for rank in range(self.bed.world_size)}

    def host(self, index: int) -> str:
        """Namespace of a host."""
        return f"{self.name}-{index}"

    def enter(self, index: int) -> list[str]:
        """What stands before a command to run it on a host: its network alone (`ip netns exec` hides cgroups too)."""
        return ["nsenter", f"--net=/run/netns/{self.host(index)}"]

    def command(self, host: int, module: str, *arguments: str) -> list[str]:
        """One host's agent: torchrun with this host's ranks, each running `python -m module arguments...`."""
        bed = self.bed
        return [
            *self.enter(host),
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(bed.num_hosts), "--node-rank", str(host), "--nproc-per-node", str(bed.ranks_per_host)),
            *("--master-addr", f"{SUBNET}.1", "--master-port", str(PORT), "--no-python"),
            *(sys.executable, "-m", *held_back_arguments(self.quotas), module, *arguments),
        ]

    def start(self, host: int, module: str, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        """Run a module once on one host, without torchrun; what it prints is added to its log."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        command = [*self.enter(host), sys.executable, "-m", module, *arguments]
        with log.open("ab") as out:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def lose(self, host: int) -> None:
        """What is seen of a host without power: its cable says nothing more, then its processes are gone."""
        self._set_cable(host, "down")
        _kill_all([self.host(host)])

    def return_host(self, host: int) -> None:
        """It can be reached again; nothing runs there."""
        self._set_cable(host, "up")

    def _set_cable(self, host: int, state: str) -> None:
        _ip("-n", f"{self.name}-hub", "link", "set", f"port{host}", state)

    def run(self, module: str, *arguments: str, log: Path, poll: Callable[[], None] = lambda: None) -> None:
        """Run a module on all ranks of all hosts; what they print goes to one log per host.

        `poll` is called a few times a second.

        Raises:
            RuntimeError: an agent ended with an error; its last lines are in the message.
        """
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        log.parent.mkdir(parents=True, exist_ok=True)
        agents: list[subprocess.Popen[bytes]] = []
        first_failure: int | None = None
        logs = [log.with_suffix(f".host{host}.txt") for host in range(self.bed.num_hosts)]
        try:
            for host, path in enumerate(logs):
                with path.open("wb") as out:
                    command = self.command(host, module, *arguments)
                    agents.append(
                        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
                    )
            while first_failure is None and any(agent.poll() is None for agent in agents):
                first_failure = next((host for host, agent in enumerate(agents) if agent.poll()), None)
                poll()
                time.sleep(0.2)
        finally:
            _kill_all(self.host(host) for host in range(self.bed.num_hosts))
            for agent in agents:
                agent.wait()
        # An agent may also have failed when the last of the others ended.  Those that were killed here are below zero.
        first_failure = next((host for host, agent in enumerate(agents) if agent.returncode > 0), first_failure)
        if first_failure is not None:
            lines = [line for line in logs[first_failure].read_text(errors="replace").splitlines() if line.strip()]
            cause = "\n".join(lines[-15:])
            raise RuntimeError(
                f"{module} on host {first_failure} ended with {agents[first_failure].returncode}:\n{cause}"
            )


def check_machine() -> None:
    """Raises `BadInputError` where hosts cannot be made, with what is missing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise BadInputError("the testbed makes network namespaces, which needs root on Linux. Run it as root.")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            raise BadInputError(
                f"the testbed needs `{tool}` of {package}. On Debian or Ubuntu: apt-get install {package}"
            )
    cgroup_root()


def remove_left_behind() -> None:
    """Remove what a maker that no longer lives has left."""
    names = {name.rsplit("-", 1)[0] for name in _namespaces() if name.startswith(f"{PREFIX}-")}
    for name in names:
        owner = name.removeprefix(f"{PREFIX}-")
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            remove(name)


def remove(name: str) -> None:
    """End all processes in the namespaces and quotas of `name`, and delete them."""
    spaces = [space for space in _namespaces() if space.startswith(f"{name}-")]
    _kill_all(spaces)
    for space in spaces:
        _ip("netns", "del", space)  # takes its interfaces, cables and limits along
    remove_quotas(name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _kill_all(spaces: Iterator[str] | Sequence[str]) -> None:
    """Until none is left: a process may start another while it is being killed."""
    waiting = list(spaces)
    for _ in range(100):
        pids = [int(pid) for space in waiting for pid in _ip("netns", "pids", space).split()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    raise RuntimeError(f"processes {pids} in {waiting} do not end")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadInputError(
            f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}. Network namespaces may be switched off here."
        )
    return done.stdout


def _limit(space: str, device: str, bits_per_second: float) -> None:
    # What a rank sends after a while of computing passes at once as far as the bucket goes, which no cable does: so the
    # bucket holds little more than two pieces, and the kernel hands on pieces of about an eighth of a millisecond.
    # The queue before it is so long that none is dropped, since TCP resends what was dropped only after 200 ms.
    piece = min(max(int(bits_per_second / 8 * PIECE_SECONDS), MIN_PIECE), MAX_PIECE)
    _ip("-n", space, "link", "set", device, "gso_max_size", str(piece))
    command = ["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf"]
    command += ["rate", f"{bits_per_second:.0f}bit", "burst", str(5 * piece // 2), "latency", "1000ms"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadInputError(f"`{' '.join(command)}` failed: {done.stderr.strip()}. The kernel may lack sch_tbf.")


def _interrupt(signum: int, frame: object) -> None:  # noqa: ARG001
    raise KeyboardInterrupt
