# torchtitan configuration, made by plait export.
# llama-3-70b on h100x64: 64 processes, global batch 1024 x 8192 tokens, bf16.
# FSDP also shards what ZeRO of this level does not: less memory than predicted.
# Save it as a module MODULE on the Python path, then: --module MODULE --config llama3_70b_plait
from torchtitan.config import ParallelismConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_70b
from torchtitan.trainer import Trainer

MODULES = [
    ["tok_embeddings", *(f"layers.{i}" for i in range(0, 20))],
    [*(f"layers.{i}" for i in range(20, 40))],
    [*(f"layers.{i}" for i in range(40, 60))],
    [*(f"layers.{i}" for i in range(60, 80)), "norm", "lm_head"],
]


def llama3_70b_plait() -> Trainer.Config:
    config = llama3_70b()
    config.model_spec = model_registry("70B")
    config.training.seq_len = 8192
    config.training.local_batch_size = 256
    config.training.global_batch_size = 1024
    config.parallelism = ParallelismConfig(
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=4,
        fsdp_reshard_after_forward="never",
        tensor_parallel_degree=4,
        pipeline_parallel_degree=4,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=1,
        module_fqns_per_model_part=MODULES,
    )
    config.activation_checkpoint = None
    return config
