#!/usr/bin/env bash
# Train on the hosts of a host file with plain mpirun, which knows the batch system and the network of its cluster.
#
#   train_mpirun.sh hostfiles/two_hosts -- digits --epochs 5     Horovod must be built for this MPI (hvd-train doctor)
#   MPIRUN_FLAGS='--mca btl_tcp_if_include eth0' train_mpirun.sh hostfiles/two_hosts -- digits
#   train_mpirun.sh hostfiles/two_hosts --help                   more options

set -eu
here=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")
PATH=$PATH:$here/.venv/bin
command -v hvd-train >/dev/null || { echo "there is no hvd-train: type make -C '$here' env" >&2 && exit 2; }
exec hvd-train launch --with mpirun --hosts "$@"
