#!/usr/bin/env bash
# Train on the hosts of a host file with plain mpirun, of Open MPI 4 or 5, or of MPICH or its relatives (Intel MPI).
#
#   train_mpirun.sh HOSTFILE [--env NAME] [--dry-run] [-- ARGUMENTS OF hvd-train train | -- SCRIPT.py ...]
#
#   train_mpirun.sh hostfiles/localhost -- digits              2 ranks here, no ssh: under a minute on 2 cores
#   train_mpirun.sh hostfiles/two_hosts -- digits --epochs 5
#
# For clusters whose mpirun knows what horovodrun does not: a batch system, a fabric, a site's defaults. Needs the same
# hvd-train in the same place on each host, with Horovod built for this very MPI (`hvd-train doctor` checks that), and
# ssh without a password where mpirun uses ssh. Ranks on other hosts get what training needs of this environment, and each
# variable that --env names. For more flags of mpirun: MPIRUN_FLAGS='--mca btl_tcp_if_include eth0'.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=_launch.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/_launch.sh"

declare -A takes=([--env]=passed_on+)
operand='' open_mpi=()
read_options "$@"
read_hosts "$operand"
find_programs
type -P mpirun >/dev/null || fail "there is no mpirun on the PATH; with train_hostfile.sh (Gloo) none is needed"

read -r -a flags <<<"${MPIRUN_FLAGS-}"
names=$("$python" -c "if True:
  import os
  from horovod.runner.util import worker_environment
  print(*worker_environment.for_other_hosts(os.environ))") || fail "$python lacks this Horovod; type hvd-train doctor"
ssh_options="-o BatchMode=yes -o ConnectTimeout=10 $(new_keys "${others[@]}")"
version=$(mpirun --version 2>&1 || true)
case $version in
  *'Open MPI'*)
    if ((EUID == 0)); then flags+=(--allow-run-as-root); fi
    for name in $names; do flags+=(-x "$name"); done
    # No binding to cores, because loader processes would share their rank's core. ob1 is what horovodrun chooses, too.
    flags+=(--bind-to none --map-by slot --mca pml ob1)
    if [[ $version == *'Open MPI) 4.'* ]]; then
      flags+=(--mca plm_rsh_args "$ssh_options")
      find_open_mpi mpirun
      if ((${#open_mpi[@]})); then flags+=(-x OPAL_PREFIX); fi
    else
      flags+=(--prtemca plm_ssh_args "$ssh_options")
    fi
    flags+=(--host "$host_list")
    ;;
  *HYDRA* | *MPICH* | *'Intel(R) MPI'*)
    flags+=(-bind-to none -hosts "$host_list" -genvlist "${names// /,}")
    ;;
  *) fail "this mpirun is neither Open MPI's nor MPICH's: $(head -n 1 <<<"$version")" ;;
esac
start "${open_mpi[@]}" mpirun -np "$num_ranks" "${flags[@]}" "$(type -P "${command[0]}")" "${command[@]:1}"
