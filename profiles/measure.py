"""Measures a cluster: what every rank of `plait profile` runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from executor.device import leave, process_group, versions
from executor.launch import QUIET, end_with_parent, report_error
from profiles.collectives import CollectiveTimings
from profiles.device import measured_device, seen_cluster
from profiles.modules import NUM_MICRO_BATCHES, NUM_WARM_UP_STEPS, InSituTimings, loading_seconds_per_sequence
from profiles.options import ProfileOptions
from profiles.overlap import OverlapTimings, ReservedMemory
from specs.base import load_document
from specs.errors import PlaitError
from specs.plan import Provenance
from specs.profile import Profile
from specs.tensors import num_parameters

METHOD = (
    "Modules in situ: steps of a model of each distinct module once, one degree everywhere, all ranks running, "
    f"{NUM_MICRO_BATCHES} micro-batches a step, {NUM_WARM_UP_STEPS} steps of warm-up; layouts interleaved over rounds; "
    "means over ranks and over the middle half of the steps by their time, collectives likewise. "
    "Split backward passes: steps with and without, in turns. "
    "Gradient sync: steps of replicas with it after backward and beside it, in turns. "
    "Collectives: all groups of a size at once after a barrier."
)


def measure(options: ProfileOptions) -> None:
    """Measure on this rank; rank 0 writes the profile.  All ranks must call it together."""
    with process_group(options.backend, options.timeout_seconds) as device:
        world_size = dist.get_world_size()
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        measured = measured_device(device, options.precision, local_size)
        bare = seen_cluster(measured, (), world_size=world_size, local_size=world_size)
        modules = InSituTimings(options, bare, device)
        overlap = OverlapTimings(options, bare, modules.model, device)
        reserved = ReservedMemory(device)
        # No more than the model has to sum in fp32.
        largest = min(options.largest_payload_bytes, 4 * num_parameters(options.model.modules()))
        collectives = CollectiveTimings(device, local_size, largest)
        _run_all(options, modules, overlap, collectives, reserved)
        network, timings = collectives.timings(), modules.timings()
        profile = Profile(
            made=Provenance(
                created_by="plait profile",
                created_at=options.created_at,
                command=options.command,
                inputs={"model": options.model.sha256()},
                versions=versions(),
            ),
            method=METHOD,
            cluster=seen_cluster(measured, network, world_size=world_size, local_size=local_size),
            backend=options.backend,
            world_size=world_size,
            modules=timings,
            collectives=network,
            optimizer=modules.optimizer_timings(),
            overhead=modules.overhead(loading_seconds_per_sequence(options.seq_len), timings),
            overlaps=overlap.timings(),
            reserved_bytes=reserved.total(),
        )
        if dist.get_rank() == 0:
            profile.save(options.out)


def _run_all(
    options: ProfileOptions,
    modules: InSituTimings,
    overlap: OverlapTimings,
    collectives: CollectiveTimings,
    reserved: ReservedMemory,
) -> None:
    """All layouts and operations, in rounds, with a bar on rank 0."""
    layouts = modules.layouts()
    steps = NUM_WARM_UP_STEPS + options.num_steps
    # A layout's step costs about in proportion to its tokens; an operation on a payload about one small step.
    weights = {layout: steps * layout[1] for layout in layouts}
    total = options.num_rounds * (
        sum(weights.values()) + modules.num_split_units + overlap.num_units + collectives.num_units
    )
    console = Console(stderr=True)
    shown = dist.get_rank() == 0 and QUIET not in os.environ
    with Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
    ) as bar:
        task = bar.add_task("", total=total)

        def go_through(work: Iterator[None], weight: float) -> None:
            for _ in work:
                bar.advance(task, weight)

        for number in range(1, options.num_rounds + 1):
            for degree, sequences in layouts:
                bar.update(task, description=f"round {number}: modules, degree {degree}, {sequences} sequences a block")
                reserved.begin()
                go_through(modules.run(degree, sequences), sequences)
                reserved.end()
            bar.update(task, description=f"round {number}: backward passes, whole and split")
            go_through(modules.run_split(), modules.split_layout[1])
            bar.update(task, description=f"round {number}: gradient sync after and beside backward")
            go_through(overlap.run(), 1)
            bar.update(task, description=f"round {number}: collectives")
            go_through(collectives.run(), 1)
            if shown and not console.is_terminal:
                print(f"round {number} of {options.num_rounds} done", file=sys.stderr, flush=True)


def main() -> None:
    """Worker process of the launcher: the options file is the only argument."""
    end_with_parent()
    try:
        measure(load_document(ProfileOptions, Path(sys.argv[1]), "options"))
    except PlaitError as error:
        report_error(error)
        sys.exit(error.exit_code)
    leave()


if __name__ == "__main__":
    main()
