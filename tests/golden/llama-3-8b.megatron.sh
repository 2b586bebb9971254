# Megatron-LM arguments, made by plait export.
# llama-3-8b on h100x8: 8 processes, global batch 16 x 8192 tokens, bf16.
# Add data, tokenizer, learning rate and checkpoints, and start it on every node:
#   source THIS_FILE
#   torchrun --nnodes 1 --nproc-per-node 8 ... pretrain_gpt.py "${PLAIT_ARGS[@]}" ...
PLAIT_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --pipeline-model-parallel-layout 'Et*8|(t*8|)*2t*8L'
    --sequence-parallel
    --micro-batch-size 1
    --global-batch-size 16
    --seq-length 8192
    --overlap-grad-reduce
    --bf16
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --kv-channels 128
    --group-query-attention
    --num-query-groups 8
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --ffn-hidden-size 14336
    --swiglu
    --disable-bias-linear
    --vocab-size 128256
    --untie-embeddings-and-output-weights
)
