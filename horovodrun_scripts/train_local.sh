#!/usr/bin/env bash
# Train on this machine: one rank per GPU or, where there is none, 2 ranks on its cores.
#
#   train_local.sh [-n RANKS] [--gloo|--mpi] [--dry-run] [-- ARGUMENTS OF hvd-train train]
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

num_ranks='' controller=gloo dry_run=''
while (($#)); do
  case $1 in
    -n | -np)
      [[ ${2-} =~ ^[1-9][0-9]{0,4}$ ]] || fail "$1 takes a number of ranks from 1, not '${2-}'"
      num_ranks=$2
      shift
      ;;
    --gloo | --mpi) controller=${1#--} ;;
    --dry-run) dry_run=yes ;;
    -h | --help) usage ;;
    --) shift && break ;;
    *) fail "unknown argument '$1'; what is for hvd-train train goes after --; see --help" ;;
  esac
  shift
done

find_programs
set -- horovodrun -np "${num_ranks:-$(default_num_ranks)}" "--$controller" hvd-train train "$@"
[[ -z $dry_run ]] || show "$@"
exec "$@"
