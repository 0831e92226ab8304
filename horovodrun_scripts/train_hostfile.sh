#!/usr/bin/env bash
# Train on the hosts of a host file: as many ranks as it has slots, started over ssh by horovodrun.
#
#   train_hostfile.sh HOSTFILE [--gloo|--mpi] [--env NAME] [--dry-run] [-- ARGUMENTS OF hvd-train train]
#
#   train_hostfile.sh hostfiles/localhost -- digits              2 ranks here, no ssh: under a minute on 2 cores
#   train_hostfile.sh hostfiles/two_hosts -- digits --epochs 5
#
# Needs ssh without a password from here to each host, and the same hvd-train in the same place on all; start it on the
# first host. A host file has one host per line, `NAME slots=N`; each slot is a rank, so give one for each GPU.
# --gloo (the default) and --mpi choose how the ranks communicate; gradients on GPUs go through NCCL either way.
# Ranks on other hosts get what training needs of this environment, and each variable that --env names.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=_launch.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/_launch.sh"

hostfile='' controller=gloo dry_run=''
while (($#)); do
  case $1 in
    --gloo | --mpi) controller=${1#--} ;;
    --env) pass_on "${2-}" && shift ;;
    --dry-run) dry_run=yes ;;
    -h | --help) usage ;;
    --) shift && break ;;
    -*) fail "unknown argument '$1'; what is for hvd-train train goes after --; see --help" ;;
    *)
      [[ -z $hostfile ]] || fail "two host files, '$hostfile' and '$1'; what is for hvd-train train goes after --"
      hostfile=$1
      ;;
  esac
  shift
done

[[ -n $hostfile ]] || fail "which host file? Such as: ${0##*/} hostfiles/localhost -- digits"
read_hosts "$hostfile"
find_programs
set -- horovodrun -np "$num_ranks" --hostfile "$hostfile" "--$controller" hvd-train train "$@"
open_mpi=()
if [[ $controller == mpi ]]; then find_open_mpi horovodrun; fi
set -- "${open_mpi[@]}" "$@"
[[ -z $dry_run ]] || show "$@"
check_hosts "$hostfile"
exec "$@"
