# shellcheck shell=bash
# Read by the scripts beside it: help, mistakes in one line, the project's programs on the PATH, the dry run.

# usage: the comment that opens the script.
usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit 0
}

# fail MESSAGE: one line on stderr, exit code 2.
fail() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 2
}

# find_programs: where horovodrun and hvd-train are not on the PATH, put the project's own environment in front of it.
find_programs() {
  if command -v horovodrun >/dev/null && command -v hvd-train >/dev/null; then return; fi
  local project program
  project=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
  project_bin=$project/.venv/bin
  for program in horovodrun hvd-train; do
    [[ -x $project_bin/$program ]] ||
      fail "there is no $program on the PATH or in $project_bin; to set it up: make -C $(printf %q "$project") env"
  done
  PATH=$project_bin:$PATH
}

# show COMMAND...: print the command as it can be typed, and end.
show() {
  local line
  printf -v line ' %q' "$@"
  # shellcheck disable=SC2016  # "$PATH" is for the shell that the line is typed into
  if [[ -n ${project_bin-} ]]; then printf 'PATH=%q:"$PATH" ' "$project_bin"; fi
  printf '%s\n' "${line# }"
  exit 0
}

# num_gpus: as many as this process may see.
num_gpus() {
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^-/,$d' | grep -c . || true
  else
    { nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU ' || true
  fi
}

# default_num_ranks: one per GPU; without one 2, but never more than cores: more gain little on one machine.
default_num_ranks() {
  local gpus cores
  gpus=$(num_gpus)
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # it would take OpenMP's limits for cores
  echo $((gpus > 0 ? gpus : cores < 2 ? cores : 2))
}

# parse_host LINE: a line of a host file without its comment; sets host and slots, or returns 1 where it is none.
# Reads what the project's Horovod reads: `h`, `h:2`, `h slots=2 max_slots=4`.
parse_host() {
  local form='^([A-Za-z0-9_.-]+)(:([0-9]{1,5}))?([[:space:]]+slots[[:space:]]*=[[:space:]]*([0-9]{1,5}))?'
  form+='([[:space:]]+max[-_]slots[[:space:]]*=[[:space:]]*[0-9]+)?[[:space:]]*$'
  [[ $1 =~ $form ]] || return 1
  # shellcheck disable=SC2034  # for the caller
  host=${BASH_REMATCH[1]} slots=${BASH_REMATCH[5]:-${BASH_REMATCH[3]:-1}}
}
