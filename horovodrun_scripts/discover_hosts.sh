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

# print_hosts NAME: print the hosts that standard input lists; errors call it NAME.
print_hosts() {
  local line number=0 host slots hosts=()
  while read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    line=${line%%#*}
    [[ $line =~ [^[:space:]] ]] || continue
    if ! parse_host "$line"; then
      printf '%s: %s, line %d: "%s" is not of the form "NAME slots=N"\n' "${0##*/}" "$1" "$number" "$line" >&2
      exit 1
    fi
    hosts+=("$host:$slots")
  done
  ((${#hosts[@]} == 0)) || printf '%s\n' "${hosts[@]}"
}

case ${1-} in
  -h | --help) usage ;;
  --slurm)
    [[ -n ${SLURM_JOB_NODELIST-} ]] || fail "--slurm: there is no Slurm allocation here (SLURM_JOB_NODELIST is not set)"
    slots=${2:-${SLURM_GPUS_ON_NODE:-1}}
    # Nodes that do not answer, which Slurm marks with *, are left out, and so are those that are down or failing.
    sinfo --noheader --Node --nodes "$SLURM_JOB_NODELIST" --format '%N %t' |
      while read -r node state; do
        [[ $state == *[*] || $state == down* || $state == fail* ]] || printf '%s:%s\n' "$node" "$slots"
      done | sort -u
    ;;
  --command)
    [[ -n ${2-} ]] || fail "--command takes a command that prints hosts"
    lines=$(bash -c "$2") || { printf '%s: %s failed\n' "${0##*/}" "$2" >&2; exit 1; }
    print_hosts "the output of $2" <<<"$lines"
    ;;
  -*) fail "unknown argument '$1'; see --help" ;;
  '') fail "which host file? Such as: ${0##*/} hostfiles/localhost" ;;
  *)
    [[ -f $1 && -r $1 ]] || { printf '%s: there is no host file %s\n' "${0##*/}" "$1" >&2; exit 1; }
    # shellcheck disable=SC2094  # it reads the file, and only prints its name
    print_hosts "$1" <"$1"
    ;;
esac
