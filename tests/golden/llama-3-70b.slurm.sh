#!/bin/bash
#SBATCH --job-name=plait-llama-3-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --no-kill  # a node that fails does not end the job: training goes on without it
#SBATCH --requeue
#SBATCH --signal=TERM@300  # five minutes before the limit: finish the step and save
#SBATCH --output=%x-%j.log
# Slurm batch file, made by plait export.
# llama-3-70b on h100x64: 64 processes, global batch 1024 x 8192 tokens, bf16.
# Submit: sbatch THIS_FILE. PLAN and RUN must be on a disk that all nodes share.
set -euo pipefail

PLAN="${PLAN:-plan.json}"
RUN="${RUN:-runs/$SLURM_JOB_NAME}"
if [ -f "$RUN/log.jsonl" ]; then RESUME=--resume; else RESUME=; fi

# One agent per node; the first node's supervises. Which node is which, Slurm tells them.
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 plait train "$PLAN" --out "$RUN" $RESUME
