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

image='' num_ranks='' binds=() dry_run=''
while (($#)); do
  case $1 in
    -n | -np)
      [[ ${2-} =~ ^[1-9][0-9]{0,4}$ ]] || fail "$1 takes a number of ranks from 1, not '${2-}'"
      num_ranks=$2
      shift
      ;;
    --bind)
      [[ -n ${2-} ]] || fail "--bind takes folders, as in --bind /scratch,/data"
      binds+=(--bind "$2")
      shift
      ;;
    --dry-run) dry_run=yes ;;
    -h | --help) usage ;;
    --) shift && break ;;
    -*) fail "unknown argument '$1'; what is for hvd-train train goes after --; see --help" ;;
    *)
      [[ -z $image ]] || fail "two images, '$image' and '$1'; what is for hvd-train train goes after --"
      image=$1
      ;;
  esac
  shift
done

[[ -n $image ]] || fail "which image? Such as: ${0##*/} hvd_train.sif -- digits"
[[ -e $image ]] || fail "there is no image $image; to make one: apptainer build $(printf %q "$image") docker-daemon:hvd_train:latest"
program=$(type -P apptainer || type -P singularity || true)
[[ -n $program ]] || fail "there is neither apptainer nor singularity on the PATH"

gpus=$(num_gpus)
inside=("${program##*/}" exec)
if ((gpus)); then inside+=(--nv); fi
inside+=(${binds[@]+"${binds[@]}"} "$image")
if ((${SLURM_NTASKS:-1} > 1)); then
  [[ -z $num_ranks ]] || fail "-n: in a Slurm allocation its tasks are the ranks ($SLURM_NTASKS)"
  set -- srun "${inside[@]}" hvd-train train "$@"
else
  set -- "${inside[@]}" horovodrun -np "${num_ranks:-$(default_num_ranks)}" --gloo hvd-train train "$@"
fi
[[ -z $dry_run ]] || show "$@"
exec "$@"
