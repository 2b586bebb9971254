"""One NVIDIA GPU, from profile to comparison, in under four minutes: is what Plait says there true?

    python -m benchmarks.gpu_check [--out FOLDER]

Profiles the GPU on a decoder of 1.1 billion parameters in bf16, plans for it, trains, compares predicted with measured
step time and peak memory, and sets the rate beside a plain torch loop (the same decoder in bf16 with torch's fused
AdamW, no fp32 master weights): tokens per second and MFU.  The numbers go to benchmarks/results/gpu_check_DEVICE.json.
Exit code 2 where torch sees no GPU.  `--tiny` runs the same code on a CPU with a model of seconds, to test it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.plain_decoder import PlainDecoder
from cost_models.flops import forward_flop
from executor.device import device_name, versions
from specs.base import load_document, write_whole
from specs.layout import Interval
from specs.model import Attention, Embedding, Head, Layer, Mlp, ModelSpec, num_units
from specs.presets import machines
from specs.profile import Profile

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Size:
    """What is trained, and how long."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    layers: int
    vocab: int
    seq_len: int
    micro_batch: int  # of the plain loop; the plan chooses its own
    global_batch: int
    steps: int
    precision: str
    block_sequences: str

    def model(self) -> ModelSpec:
        width = self.hidden // self.heads
        attention = Attention(
            hidden=self.hidden, num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=width, rope_theta=500000.0
        )
        layer = Layer(attention=attention, feed_forward=Mlp(hidden=self.hidden, ffn=self.ffn), repeat=self.layers)
        return ModelSpec(
            name=f"gpu-check-{self.hidden}x{self.layers}",
            embedding=Embedding(hidden=self.hidden, vocab=self.vocab),
            layers=(layer,),
            head=Head(hidden=self.hidden, vocab=self.vocab),
        )


REAL = Size(2048, 16, 8, 8192, 16, 32000, 2048, 4, 16, 20, "bf16", "1,2,4,8")
TINY = Size(64, 4, 2, 160, 2, 256, 32, 2, 4, 6, "fp32", "1,2,4")


def plait(*arguments: object) -> str:
    """One command; its output.  Ends the check with the command's own message when it fails."""
    command = [sys.executable, "-m", "cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"plait {arguments[0]} ended with code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def step_flop(model: ModelSpec, size: Size) -> float:
    """Operations that a step needs: three times the forward pass, attention over the pairs that the mask leaves.

    Recomputation does not count, as MFU is defined [PaLM, arXiv 2204.02311, appendix B].
    """
    tokens = size.global_batch * size.seq_len
    modules = [module for _, module in model.modules()]
    return 3.0 * sum(
        forward_flop(m, block_tokens=tokens, seq_len=size.seq_len, units=Interval(0, num_units(m))) for m in modules
    )


def plain_loop(model: ModelSpec, size: Size, device: torch.device) -> dict[str, Any]:
    """Median seconds of a step and peak bytes of the plain decoder."""
    dtype = torch.bfloat16 if size.precision == "bf16" else torch.float32
    decoder = PlainDecoder(model=model).to(device, dtype)
    adam = torch.optim.AdamW(decoder.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    seconds = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(size.steps):
        tokens = torch.randint(model.vocab, (size.global_batch, size.seq_len + 1), generator=generator).to(device)
        begin = time.perf_counter()
        for part in tokens.split(size.micro_batch):
            logits = decoder(part[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum")
            (loss / (size.global_batch * size.seq_len)).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"step_time_seconds": sorted(seconds[2:])[len(seconds[2:]) // 2], "peak_memory_bytes": peak}


def peak_flop(name: str, precision: str) -> float | None:
    """Datasheet rate of a device that torch names so; None when no shipped one matches."""
    words = name.lower().replace("-", " ").split()
    for key, machine in machines().items():
        if key.split("-")[0] in words:
            return machine.device.peak_flop_per_second.get(precision)
    return None


def check(size: Size, device: torch.device, folder: Path) -> dict[str, Any]:
    """All of it; the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    model, begin = size.model(), time.monotonic()
    paths = {name: folder / f"{name}.json" for name in ("model", "profile", "plan")}
    write_whole(paths["model"], model.model_dump_json())
    shape = ("--model", paths["model"], "--seq-len", size.seq_len)
    sequences = ("--block-sequences", size.block_sequences)
    plait("profile", *shape, "--nproc", 1, *sequences, "--steps", 4, "--rounds", 1, "--out", paths["profile"])
    batch = ("--global-batch", size.global_batch, "--precision", size.precision)
    plait("plan", *shape, *batch, "--profile", paths["profile"], "--out", paths["plan"])
    plait("train", paths["plan"], "--out", folder / "run", "--steps", size.steps, "--checkpoint-every", 0)
    compared = json.loads(plait("compare", folder / "run", "--json"))
    plain = plain_loop(model, size, device)
    name, needed = device_name(device), step_flop(model, size)
    best = peak_flop(name, size.precision)
    ours = compared["step_time_seconds"]["measured"]
    tokens = size.global_batch * size.seq_len
    return {
        "device": name,
        "versions": versions(),
        "date": str(datetime.now(tz=timezone.utc).date()),
        "model": model.name,
        "precision": size.precision,
        "tokens_per_step": tokens,
        "profile_created": load_document(Profile, paths["profile"], "profile").made.created_at,
        "step_time_seconds": compared["step_time_seconds"],
        "memory_bytes": compared["memory_bytes"],
        "memory_method": compared["memory_method"],
        "tokens_per_second": tokens / ours,
        "plain_torch": {**plain, "tokens_per_second": tokens / plain["step_time_seconds"]},
        "step_time_over_plain_torch": ours / plain["step_time_seconds"],
        "peak_flop_per_second": best,
        "mfu": None if best is None else needed / ours / best,
        "mfu_plain_torch": None if best is None else needed / plain["step_time_seconds"] / best,
        "seconds": time.monotonic() - begin,
    }


def main() -> None:
    """Check, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="folder of its files")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in seconds: tests this script, shows nothing")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print(
            "gpu_check needs an NVIDIA GPU and torch sees none here: nothing was measured. Run it where "
            "`torch.cuda.is_available()` is true, or test the script itself with --tiny.",
            file=sys.stderr,
        )
        sys.exit(2)
    device = torch.device("cpu" if options.tiny else "cuda")
    if options.tiny:
        torch.set_num_threads(1)  # as the workers do
    found = check(TINY if options.tiny else REAL, device, options.out)
    text = json.dumps(found, indent=1) + "\n"
    name = "tiny" if options.tiny else found["device"].lower().replace(" ", "-")
    write_whole((options.out if options.tiny else RESULTS) / f"gpu_check_{name}.json", text)
    print(text, end="")


if __name__ == "__main__":
    main()
