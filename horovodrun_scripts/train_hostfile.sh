#!/usr/bin/env bash
# Train on the hosts of a host file, over ssh: as many ranks as it has slots. Start it on the first host.
#
#   train_hostfile.sh hostfiles/localhost -- digits              2 ranks here, no ssh: under a minute on 2 cores
#   train_hostfile.sh hostfiles/two_hosts --mpi -- digits        over MPI in place of Gloo
#   train_hostfile.sh hostfiles/two_hosts --help                 more options

set -eu
here=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")
PATH=$PATH:$here/.venv/bin
command -v hvd-train >/dev/null || { echo "there is no hvd-train: type make -C '$here' env" >&2 && exit 2; }
exec hvd-train launch --hosts "$@"
