# Megatron-LM arguments, made by plait export.
# mixtral-8x7b on h100x64: 64 processes, global batch 1024 x 4096 tokens, bf16.
# Add data, tokenizer, learning rate and checkpoints, and start it on every node:
#   source THIS_FILE
#   torchrun --nnodes 8 --nproc-per-node 8 ... pretrain_gpt.py "${PLAIT_ARGS[@]}" ...
PLAIT_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 4
    --pipeline-model-parallel-layout 'Et*8|(t*8|)*2t*8L'
    --sequence-parallel
    --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1
    --micro-batch-size 2
    --global-batch-size 1024
    --seq-length 4096
    --overlap-grad-reduce
    --use-distributed-optimizer
    --overlap-param-gather
    --bf16
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --kv-channels 128
    --group-query-attention
    --num-query-groups 8
    --max-position-embeddings 32768
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --ffn-hidden-size 14336
    --swiglu
    --disable-bias-linear
    --num-experts 8
    --moe-router-topk 2
    --moe-ffn-hidden-size 14336
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --vocab-size 32000
    --untie-embeddings-and-output-weights
)
