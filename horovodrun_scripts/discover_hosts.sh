#!/usr/bin/env bash
# Print the hosts that a job may use now, one `NAME:SLOTS` a line. An elastic job runs this every second.
#
#   discover_hosts.sh HOSTFILE             the hosts of a file, which may be edited while the job runs
#   discover_hosts.sh --slurm [SLOTS]      the nodes of this Slurm allocation that answer (SLOTS each, or one per GPU, or 1)
#   discover_hosts.sh --command 'COMMAND'  the hosts that a command of yours prints, in any form below
#
# A line is `NAME slots=N`, `NAME:N` or `NAME` (one slot); blank lines and comments are skipped. A bad line is printed
# on stderr, with exit code 1, and a running job keeps the last good list. An empty list is no error: all may be away.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=_launch.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/_launch.sh"

case ${1-} in
  -h | --help) usage ;;
  --slurm)
    [[ -n ${SLURM_JOB_NODELIST-} ]] || fail "--slurm: there is no Slurm allocation here (SLURM_JOB_NODELIST is not set)"
    # Nodes that do not answer, which Slurm marks with *, are left out, and so are those that are down or failing.
    hosts=$(sinfo --noheader --Node --nodes "$SLURM_JOB_NODELIST" --format '%N %t' | sort -u |
      awk -v slots="${2:-${SLURM_GPUS_ON_NODE:-1}}" '$2 !~ /[*]|^down|^fail/ { print $1 ":" slots }')
    ;;
  --command)
    [[ -n ${2-} ]] || fail "--command takes a command that prints hosts"
    lines=$(bash -c "$2" || fail "$2 failed") || exit 1
    hosts=$(list_hosts <(echo "$lines") "the output of $2") || exit 1
    ;;
  -*) fail "unknown argument '$1'; see --help" ;;
  '') fail "which host file? Such as: ${0##*/} hostfiles/localhost" ;;
  *) hosts=$(list_hosts "$1") || exit 1 ;;
esac
[[ -z $hosts ]] || printf '%s\n' "$hosts"
