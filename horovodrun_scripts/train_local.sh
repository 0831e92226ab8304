#!/usr/bin/env bash
# Train on this machine: one rank per GPU or, where there is none, 2 ranks on its cores.
#
#   train_local.sh [-n RANKS] [--gloo|--mpi] [--dry-run] [-- ARGUMENTS OF hvd-train train | -- SCRIPT.py ...]
#
#   train_local.sh                            the digits, 20 epochs: under a minute on 2 cores
#   train_local.sh -n 4 -- digits --epochs 5
#   train_local.sh --dry-run -- --help        print the command; run nothing
#
# Needs this machine alone, after `make env` or with horovodrun and hvd-train on the PATH.
# --gloo (the default) and --mpi choose how the ranks communicate; gradients on GPUs go through NCCL either way.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=_launch.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/_launch.sh"

declare -A takes=([-n]=num_ranks# [-np]=num_ranks# [--gloo]=controller=gloo [--mpi]=controller=mpi)
num_ranks='' controller=gloo
read_options "$@"
find_programs
start horovodrun -np "${num_ranks:-$(default_num_ranks)}" "--$controller" "${command[@]}"
