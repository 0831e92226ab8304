#!/usr/bin/env bash
# ImageNet on two nodes with four GPUs each, of a Slurm cluster: examples/slurm.sh /data/imagenet
#
# Before its time is over the job commits, goes back into the queue and resumes. The tests run the script that this
# submits on a real Slurm, on CPUs; ImageNet was never trained with it.
set -euo pipefail

script=$(dirname "$0")/../horovodrun_scripts/train_slurm.sbatch
exec sbatch --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 --cpus-per-task 8 --time 24:00:00 "$script" \
  imagenet-resnet50 --data-dir "$@"
