"""A run's numbers while it runs: Prometheus metrics over HTTP, and scalars for TensorBoard, both on request.

Both are fed with the records of the run log, in the process that writes it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from specs.errors import BadInputError
from specs.options import TrainOptions
from specs.runlog import (
    CheckpointRecord,
    EvaluationRecord,
    IncidentRecord,
    MemoryRecord,
    Record,
    StartRecord,
    StepRecord,
)

TENSORBOARD = "tensorboard"  # folder of the run


class _Sink(Protocol):
    def record(self, record: Record) -> None: ...
    def close(self) -> None: ...


class Live:
    """What was asked for, perhaps nothing.  Raises `BadInputError` for a port in use and a package that is missing."""

    def __init__(self, options: TrainOptions) -> None:
        self._sinks: list[_Sink] = []
        if options.metrics_port is not None:
            self._sinks.append(_Prometheus(options.metrics_address, options.metrics_port))
        if options.tensorboard:
            self._sinks.append(_TensorBoard(str(options.out / TENSORBOARD)))

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def record(self, record: Record) -> None:
        """A record of the run log."""
        for sink in self._sinks:
            sink.record(record)

    def close(self) -> None:
        """Write what is left, free the port."""
        for sink in self._sinks:
            sink.close()
        self._sinks.clear()


def _package(option: str, name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise BadInputError(f"{option} needs the package {name}. Install it: pip install 'plait[live]'.") from None


class _Prometheus:
    """Gauges and counters, served until the run ends."""

    def __init__(self, address: str, port: int) -> None:
        prometheus = _package("--metrics-port", "prometheus_client")
        registry = prometheus.CollectorRegistry()

        def gauge(name: str, words: str, *labels: str) -> Any:
            return prometheus.Gauge(f"plait_{name}", words, labels, registry=registry)

        self._step = gauge("step", "Last optimizer step")
        self._loss = gauge("loss", "Mean training loss of the last step, nats per token")
        self._held_out = gauge("held_out_loss", "Loss on held-out data, nats per token")
        self._norm = gauge("gradient_norm", "Global gradient norm before clipping")
        self._rate = gauge("learning_rate", "Learning rate of the last step")
        self._seconds = gauge("step_seconds", "Duration of the last step")
        self._terms = gauge("step_term_seconds", "Duration of the last step by term, mean over ranks", "term")
        self._speed = gauge("tokens_per_second", "Tokens of the last step over its duration")
        self._memory = gauge("memory_peak_bytes", "Measured peak memory", "rank")
        self._world = gauge("world_size", "Ranks that train")
        self._checkpoint = gauge("checkpoint_step", "Last step that is saved")
        self._stall = gauge("checkpoint_seconds", "What training waited for the last checkpoint")
        self._tokens = prometheus.Counter("plait_tokens", "Tokens trained on, repeated ones too", registry=registry)
        self._incidents = prometheus.Counter(
            "plait_incidents", "Changes of the devices in use", ("policy",), registry=registry
        )
        try:
            self._server, self._thread = prometheus.start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            raise BadInputError(
                f"metrics cannot be served on {address}:{port}: {error.strerror}. Choose another --metrics-port."
            ) from None

    def record(self, record: Record) -> None:
        match record:
            case StartRecord():
                self._world.set(record.world_size)
            case StepRecord():
                self._step.set(record.step)
                self._loss.set(record.loss)
                self._norm.set(record.gradient_norm)
                self._rate.set(record.learning_rate)
                self._seconds.set(record.seconds)
                self._speed.set(record.tokens / record.seconds if record.seconds else 0.0)
                self._tokens.inc(record.tokens)
                for name, seconds in record.terms.model_dump().items():
                    self._terms.labels(name).set(seconds)
            case EvaluationRecord():
                self._held_out.set(record.loss)
            case MemoryRecord():
                for rank, size in record.peak_bytes.items():
                    self._memory.labels(str(rank)).set(size)
            case CheckpointRecord():
                self._checkpoint.set(record.step)
                self._stall.set(record.seconds)
            case IncidentRecord():
                self._world.set(record.world_size)
                self._incidents.labels(record.policy).inc()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _TensorBoard:
    """Scalars under the names of torchtitan (components/metrics.py of 0.3), so that the same charts show both."""

    def __init__(self, folder: str) -> None:
        self._writer = _package("--tensorboard", "tensorboardX").FileWriter(folder)
        self._summary = _package("--tensorboard", "tensorboardX.proto.summary_pb2").Summary
        self._world_size = 1
        self._tokens = 0

    def record(self, record: Record) -> None:
        match record:
            case StartRecord() | IncidentRecord():
                self._world_size = max(1, record.world_size)
            case StepRecord():
                self._tokens += record.tokens
                self._add(record.step, record.time, _step_scalars(record, self._world_size, self._tokens))
            case EvaluationRecord():
                self._add(record.step, record.time, {"validation_metrics/loss": record.loss})
            case MemoryRecord():
                self._add(1, None, {"memory/max_active(GiB)": max(record.peak_bytes.values()) / 2**30})

    def _add(self, step: int, time: float | None, scalars: dict[str, float]) -> None:
        # Its `add_scalar` would take the brackets out of the names.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_summary(self._summary(value=values), step, walltime=time)

    def close(self) -> None:
        self._writer.close()


def _step_scalars(record: StepRecord, world_size: int, tokens: int) -> dict[str, float]:
    seconds = max(record.seconds, 1e-9)
    terms = {f"step_terms/{name}(s)": value for name, value in record.terms.model_dump().items()}
    return {
        "loss_metrics/global_avg_loss": record.loss,
        "grad_norm": record.gradient_norm,
        "lr": record.learning_rate,
        "n_tokens_seen": float(tokens),
        "throughput(tps)": record.tokens / seconds / world_size,  # per device, as there
        "time_metrics/end_to_end(s)": record.seconds,
        "time_metrics/data_loading(s)": record.terms.data,
        "time_metrics/data_loading(%)": 100.0 * record.terms.data / seconds,
        **terms,
    }
