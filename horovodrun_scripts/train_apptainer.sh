#!/usr/bin/env bash
# Train in an Apptainer (Singularity) container: on this machine, or as the tasks of a Slurm allocation.
#
#   train_apptainer.sh IMAGE [-n RANKS] [--bind DIRS] [--dry-run] [-- ARGUMENTS OF hvd-train train]
#
#   apptainer build hvd_train.sif docker-daemon:hvd_train:latest     makes IMAGE from the Dockerfile's image
#   train_apptainer.sh hvd_train.sif -- digits --epochs 5
#   salloc --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 train_apptainer.sh hvd_train.sif -- digits
#
# In an allocation of several tasks srun starts a container for each task, without MPI and ssh. Elsewhere horovodrun in
# one container starts a rank per GPU, or 2. --bind is Apptainer's: it adds folders to the home and the current folder.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=_launch.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/_launch.sh"

declare -A takes=([-n]=num_ranks# [-np]=num_ranks# [--bind]=binds+)
operand='' num_ranks='' binds=()
read_options "$@"
[[ -n $operand ]] || fail "which image? Such as: ${0##*/} hvd_train.sif -- digits"
[[ -e $operand ]] ||
  fail "there is no image $operand; to make one: apptainer build $(printf %q "$operand") docker-daemon:hvd_train:latest"
program=$(type -P apptainer || type -P singularity) || fail "there is neither apptainer nor singularity on the PATH"

inside=("${program##*/}" exec)
if (($(num_gpus))); then inside+=(--nv); fi
inside+=("${binds[@]}" "$operand")
if ((${SLURM_NTASKS:-1} > 1)); then
  [[ -z $num_ranks ]] || fail "-n: in a Slurm allocation its tasks are the ranks ($SLURM_NTASKS)"
  start srun "${inside[@]}" hvd-train train "${arguments[@]}"
else
  start "${inside[@]}" horovodrun -np "${num_ranks:-$(default_num_ranks)}" --gloo hvd-train train "${arguments[@]}"
fi
