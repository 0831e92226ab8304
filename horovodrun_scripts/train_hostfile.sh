#!/usr/bin/env bash
# Train on the hosts of a host file: as many ranks as it has slots, started over ssh by horovodrun.
#
#   train_hostfile.sh HOSTFILE [--gloo|--mpi] [--dry-run] [-- ARGUMENTS OF hvd-train train]
#
#   train_hostfile.sh hostfiles/localhost -- digits              2 ranks here, no ssh: under a minute on 2 cores
#   train_hostfile.sh hostfiles/two_hosts -- digits --epochs 5
#
# Needs: on each host ssh without a password from here, and the same hvd-train in the same place; start it on the first.
# A host file has one host per line, `NAME slots=N`: a slot is a rank, so one for each GPU.
# --gloo (the default) and --mpi say how the ranks talk to one another; gradients on GPUs go through NCCL either way.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=_launch.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/_launch.sh"

# sum_slots FILE: sets num_ranks.
sum_slots() {
  # shellcheck disable=SC2034  # parse_host sets host
  local line number=0 host slots
  num_ranks=0
  while read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    [[ ${line%%#*} =~ [^[:space:]] ]] || continue
    parse_host "${line%%#*}" || fail "$1, line $number: '${line%$'\r'}' is not of the form 'NAME slots=N'"
    num_ranks=$((num_ranks + 10#$slots))
  done <"$1"
  ((num_ranks > 0)) || fail "$1 has no slots: one host per line, 'NAME slots=N'"
}

hostfile='' controller=gloo dry_run=''
while (($#)); do
  case $1 in
    --gloo | --mpi) controller=${1#--} ;;
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
[[ -f $hostfile && -r $hostfile ]] || fail "there is no host file $hostfile"
sum_slots "$hostfile"
find_programs
set -- horovodrun -np "$num_ranks" --hostfile "$hostfile" "--$controller" hvd-train train "$@"
# ssh gives the other hosts a PATH without this environment: its Open MPI has to be told where its daemon is.
orted=$(dirname -- "$(type -P horovodrun)")/orted
if [[ $controller == mpi && -x $orted && -z ${OMPI_MCA_orte_launch_agent-} ]]; then
  set -- env "OMPI_MCA_orte_launch_agent=$(printf %q "$orted")" "$@"
fi
[[ -z $dry_run ]] || show "$@"
exec "$@"
