# Megatron-LM arguments, made by plait export.
# llama-3-70b on h100x64: 64 processes, global batch 1024 x 8192 tokens, bf16.
# Add data, tokenizer, learning rate and checkpoints, and start it on every node:
#   source THIS_FILE
#   torchrun --nnodes 8 --nproc-per-node 8 ... pretrain_gpt.py "${PLAIT_ARGS[@]}" ...
PLAIT_ARGS=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 4
    --pipeline-model-parallel-layout 'Et*20|(t*20|)*2t*20L'
    --sequence-parallel
    --micro-batch-size 1
    --global-batch-size 1024
    --seq-length 8192
    --recompute-granularity selective
    --recompute-modules core_attn
    --overlap-grad-reduce
    --use-distributed-optimizer
    --overlap-param-gather
    --bf16
    --num-layers 80
    --hidden-size 8192
    --num-attention-heads 64
    --kv-channels 128
    --group-query-attention
    --num-query-groups 8
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --ffn-hidden-size 28672
    --swiglu
    --disable-bias-linear
    --vocab-size 128256
    --untie-embeddings-and-output-weights
)
