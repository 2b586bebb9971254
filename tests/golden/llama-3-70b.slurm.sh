#!/bin/bash
#SBATCH --job-name=plait-llama-3-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@300  # five minutes before the limit: finish the step and save
#SBATCH --output=%x-%j.log
# Slurm batch file, made by plait export.
# llama-3-70b on h100x64: 64 processes, global batch 1024 x 8192 tokens, bf16.
# Submit: sbatch THIS_FILE. PLAN and RUN must be on a disk that all nodes share.
set -euo pipefail

export PLAN="${PLAN:-plan.json}"
export RUN="${RUN:-runs/$SLURM_JOB_NAME}"
export HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
if [ -f "$RUN/log.jsonl" ]; then export RESUME=--resume; else export RESUME=; fi

srun --kill-on-bad-exit=1 bash -c '
PROCESSES=8
exec torchrun --nnodes 8 --nproc-per-node "$PROCESSES" --node-rank "$SLURM_NODEID" \
    --master-addr "$HEAD" --master-port 29500 -m cli train "$PLAN" --out "$RUN" $RESUME
'
