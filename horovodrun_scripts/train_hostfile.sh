#!/usr/bin/env bash
# Train on the hosts of a host file: as many ranks as it has slots, started over ssh by horovodrun.
#
#   train_hostfile.sh HOSTFILE [--gloo|--mpi] [--env NAME] [--dry-run] [-- ARGUMENTS OF hvd-train train | -- SCRIPT.py ...]
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

declare -A takes=([--gloo]=controller=gloo [--mpi]=controller=mpi [--env]=passed_on+)
operand='' controller=gloo open_mpi=()
read_options "$@"
read_hosts "$operand"
find_programs
if [[ $controller == mpi ]]; then find_open_mpi horovodrun; fi
[[ -n $dry_run ]] || check_hosts "$operand"
set -- "${open_mpi[@]}" horovodrun -np "$num_ranks" --hostfile "$operand" "--$controller"
start "$@" "${command[@]}"
