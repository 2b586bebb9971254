# torchtitan configuration, made by plait export.
# llama-3-8b on h100x8: 8 processes, global batch 16 x 8192 tokens, bf16.
# Save it as a module MODULE on the Python path, then: --module MODULE --config llama3_8b_plait
from torchtitan.config import ParallelismConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.trainer import Trainer

MODULES = [
    ["tok_embeddings", *(f"layers.{i}" for i in range(0, 8))],
    [*(f"layers.{i}" for i in range(8, 16))],
    [*(f"layers.{i}" for i in range(16, 24))],
    [*(f"layers.{i}" for i in range(24, 32)), "norm", "lm_head"],
]


def llama3_8b_plait() -> Trainer.Config:
    config = llama3_8b()
    config.model_spec = model_registry("8B")
    config.training.seq_len = 8192
    config.training.local_batch_size = 8
    config.training.global_batch_size = 16
    config.parallelism = ParallelismConfig(
        data_parallel_replicate_degree=2,
        data_parallel_shard_degree=1,
        fsdp_reshard_after_forward="never",
        tensor_parallel_degree=2,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_microbatch_size=1,
        module_fqns_per_model_part=MODULES,
    )
    config.activation_checkpoint = None
    return config
