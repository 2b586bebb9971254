"""What a training run needs besides its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from specs.base import Document, Spec

Backend = Literal["gloo", "nccl"]
OnLoss = Literal["shrink", "restart", "stop"]


class OptimizerOptions(Spec):
    """AdamW, clipping and the learning rate's course.  Betas and clipping: arXiv 2005.14165, appendix B."""

    learning_rate: PositiveFloat = 3e-3
    final_fraction: float = Field(0.1, ge=0, le=1)  # of the learning rate, reached at the last step
    warmup_steps: NonNegativeInt = 10
    num_steps: PositiveInt = 100
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    epsilon: PositiveFloat = 1e-8
    weight_decay: float = Field(0.1, ge=0)
    max_gradient_norm: PositiveFloat = 1.0


class TrainOptions(Document):
    """Kept in RUN/options.json, so that --resume repeats it."""

    out: Path
    data: str = "stdlib"
    tokenizer: Path | None = None
    initial_weights: Path | None = None  # a Hugging Face folder; None: drawn from the seed
    seed: NonNegativeInt = 0
    optimizer: OptimizerOptions = OptimizerOptions()
    checkpoint_every: NonNegativeInt = 50  # steps; 0: only at the end
    keep_checkpoints: PositiveInt = 2
    evaluate_every: NonNegativeInt = 0  # steps; 0: only at the end
    evaluation_batches: PositiveInt = 4
    backend: Backend | None = None  # None: nccl where a GPU is, else gloo
    timeout_seconds: PositiveFloat = 600.0  # of a collective
    on_loss: OnLoss = "shrink"  # a worker is lost: go on with the devices that are left, start it again, or stop
    return_after_seconds: PositiveFloat | None = None  # try a lost device again after so long; None: never
    hang_seconds: PositiveFloat = 30.0  # without progress, beyond five median steps: a worker hangs
    replan_seconds: PositiveFloat = 10.0  # to look for a plan without the lost devices
    profile: Path | None = None  # prices plans without the lost devices; None: shipped device data
    rebalance: bool = False  # give a slow device less work
    metrics_port: PositiveInt | None = None  # serve Prometheus metrics; None: not
    metrics_address: str = "127.0.0.1"
    tensorboard: bool = False  # write scalars to RUN/tensorboard
