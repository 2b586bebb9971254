# Megatron-LM arguments, made by plait export.
# llama-3-405b on h100x512: 512 processes, global batch 1024 x 8192 tokens, bf16.
# Add data, tokenizer, learning rate and checkpoints, and start it on every node:
#   source THIS_FILE
#   torchrun --nnodes 64 --nproc-per-node 8 ... pretrain_gpt.py "${PLAIT_ARGS[@]}" ...
PLAIT_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout 'Et*7|(t*8|)*14t*7L'
    --sequence-parallel
    --micro-batch-size 1
    --global-batch-size 1024
    --seq-length 8192
    --recompute-granularity full
    --recompute-method block
    --recompute-num-layers 2
    --overlap-grad-reduce
    --use-distributed-optimizer
    --overlap-param-gather
    --bf16
    --num-layers 126
    --hidden-size 16384
    --num-attention-heads 128
    --kv-channels 128
    --group-query-attention
    --num-query-groups 8
    --max-position-embeddings 131072
    --position-embedding-type rope
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 8
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --ffn-hidden-size 53248
    --swiglu
    --disable-bias-linear
    --vocab-size 128256
    --untie-embeddings-and-output-weights
)
