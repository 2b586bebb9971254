# Megatron-LM arguments, made by plait export.
# gpt2 on h100x8: 8 processes, global batch 512 x 1024 tokens, bf16.
# Add data, tokenizer, learning rate and checkpoints, and start it on every node:
#   source THIS_FILE
#   torchrun --nnodes 1 --nproc-per-node 8 ... pretrain_gpt.py "${PLAIT_ARGS[@]}" ...
PLAIT_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --micro-batch-size 64
    --global-batch-size 512
    --seq-length 1024
    --overlap-grad-reduce
    --bf16
    --num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --kv-channels 64
    --max-position-embeddings 1024
    --position-embedding-type learned_absolute
    --normalization LayerNorm
    --norm-epsilon 1e-05
    --ffn-hidden-size 3072
    --vocab-size 50257
)
